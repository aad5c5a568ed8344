"""A cache on CPU and disk: what they hold besides the GPUs, and when bringing it back beats computing it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool import prefill as arithmetic
from kvtool.engines import ideal
from kvtool.plan_lengths import any_length, request_costs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtool.capacity import Holder
    from kvtool.plan import PlanCase
    from kvtool.prefill import Prefill

    Floats = NDArray[np.float64]

LONGEST = 2**20
"""Tokens up to which a break-even is looked for where the model states no maximum."""
ALONE = "a prefill is taken alone, without a queue or a batch: an estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """What a tier of memory holds besides the GPUs, of one replica, and what bringing it back takes."""

    tier: str
    """`cpu` or `disk`."""
    capacity_bytes: int
    """For all ranks of a replica: they share it."""
    bytes_per_s: float
    num_blocks: int | None
    tokens: int
    requests: float
    """Of the case's context."""
    request_bytes: int
    """Of one request, all ranks together, copies included."""
    load_s: float
    prefill_s: float | None
    """Of computing its cache anew: an estimate; None: what a prefill computes is not known."""
    break_even_context: int | None
    """Loading is faster for prompts of this many tokens and all longer ones; None: not at the longest."""
    loads_faster: bool | None
    """At the case's context."""
    notes: tuple[str, ...] = ()


def offload(
    case: PlanCase,
    prefill: Prefill | None,
    *,
    cpu_bytes: int,
    disk_bytes: int,
    cpu_bandwidth: float,
    disk_bandwidth: float,
) -> tuple[Offload, ...]:
    """A row for the CPU and one for the disk, each where it has bytes.

    `cpu_bandwidth`, bytes a second, is of each GPU's own link: ranks load side by side. `disk_bandwidth`
    is of the disk, which all ranks share; what it reads goes over these links too, at the same time.
    """
    tiers = (("cpu", cpu_bytes, cpu_bandwidth), ("disk", disk_bytes, disk_bandwidth))
    return tuple(
        _tier(case, prefill, name, room, rate, cpu_bandwidth) for name, room, rate in tiers if room
    )


def _tier(
    case: PlanCase, prefill: Prefill | None, name: str, room: int, rate: float, link: float
) -> Offload:
    import numpy as np

    holder, context = any_length(case.holder), case.context
    row, request = holder.row(context), replica_bytes(holder, context)
    blocks = row.get("blocks_per_request")
    held = None if blocks is None else room // (request // blocks)
    requests = held / blocks if held is not None and blocks else room / request
    ranks = request / row["per_gpu_bytes"] if name == "disk" else 0.0
    top = min(LONGEST, holder.layout.shape.max_context or LONGEST)
    contexts = np.arange(1, max(top, context) + 1)
    load = _load_s(holder, contexts, rate, link, ranks=ranks)
    anew = None if prefill is None else arithmetic.seconds(prefill, contexts, 0 * contexts)
    at = context - 1
    return Offload(
        tier=name,
        capacity_bytes=room,
        bytes_per_s=rate,
        num_blocks=held,
        tokens=int(requests * context),
        requests=requests,
        request_bytes=request,
        load_s=float(load[at]),
        prefill_s=None if anew is None else float(anew[at]),
        break_even_context=None if anew is None else _break_even(load, anew),
        loads_faster=None if anew is None else bool(load[at] < anew[at]),
        notes=() if anew is None else (ALONE,),
    )


def replica_bytes(holder: Holder, context: int) -> int:
    """A request's cache on all ranks of a replica: heads and latents that are copied count each time."""
    if holder.engine == "vllm":
        return int(holder.row(context)["total_bytes"])
    one = ideal.size(
        replace(holder.layout, pp=1), context=context, encoder=holder.encoder_at(context)
    )
    return one.rank_bytes * holder.layout.tp


def _load_s(
    holder: Holder, contexts: NDArray[np.int64], rate: float, link: float, *, ranks: float
) -> Floats:
    """Seconds to bring requests of these contexts back over a rank's link; from a disk that so many ranks
    share, over whichever is slower."""
    import numpy as np

    each = request_costs(holder, contexts) * (holder.row(1).get("bytes_per_block") or 1)
    return np.maximum(each / link, ranks * each / rate)


def _break_even(load: Floats, anew: Floats) -> int | None:
    """The first context from which on loading is faster, up to the longest."""
    import numpy as np

    slower = np.flatnonzero(load >= anew)
    first = int(slower[-1]) + 2 if len(slower) else 1
    return first if first <= len(load) else None
