"""Beyond one GPU: ways to split a model, prefill and decode apart, a cache on CPU and disk."""

from kvtool.beyond.apart import Apart, disaggregation, prefill_on
from kvtool.beyond.tiers import Offload, offload
from kvtool.beyond.ways import Refused, Ways, parallel_rows

__all__ = [
    "Apart",
    "Offload",
    "Refused",
    "Ways",
    "disaggregation",
    "offload",
    "parallel_rows",
    "prefill_on",
]
