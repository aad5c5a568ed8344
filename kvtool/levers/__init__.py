"""What would make a plan fit, and what each lever gains: KV dtype, weights, GPUs, context, utilisation."""

from __future__ import annotations

from kvtool.levers.alternatives import alternatives, instead
from kvtool.levers.changes import Alternative
from kvtool.levers.presets import cheapest
from kvtool.levers.ranked import cache_or_weights, levers

__all__ = ["Alternative", "alternatives", "cache_or_weights", "cheapest", "instead", "levers"]
