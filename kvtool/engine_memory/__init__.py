"""What an engine keeps of a GPU's memory besides weights and KV cache, as ranges with their basis.

usable(engine, gpu, utilization)  −  weights of a rank  −  overhead(engine, sizes, …)  =  KV cache
"""

from __future__ import annotations

from kvtool.engine_memory.overhead import kv_range, overhead
from kvtool.engine_memory.ranges import Line, Overhead, Range
from kvtool.engine_memory.sizes import ModelSizes, sizes_of
from kvtool.engine_memory.usable import usable

__all__ = ["Line", "ModelSizes", "Overhead", "Range", "kv_range", "overhead", "sizes_of", "usable"]
