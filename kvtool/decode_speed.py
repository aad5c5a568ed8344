"""How fast a model decodes on a GPU, by the roofline: what a step reads over the bandwidth, or what it computes
over the rate, whichever takes longer (Williams et al., "Roofline", CACM 52(4), 2009).

A step reads the weights once and the cache of every request in it. Figures are of a rank of a mean stage; ranks
work side by side, what they exchange takes no time, and pipeline stages come one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvtool.cache import CacheLayout
from kvtool.capacity import Holder, needs_of
from kvtool.engines import ideal
from kvtool.model.shape import LayerCache

OVERHEAD_NS = 1_000_000
"""Of a step on the host: an estimate. vLLM's own scheduler takes 0.3 to 1.3 ms (docs/performance.md)."""
READ_EFFICIENCY = 0.8
"""Share of the peak bandwidth that reading reaches: an estimate. Paged decode kernels measured elsewhere
reach 0.78 to 0.9 of a copy's bandwidth."""
COMPUTE_EFFICIENCY = 0.5
"""Share of the peak that matrices reach in a step: an estimate, as for a prefill."""
MOST_BATCH = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """What a step meets on the fullest rank of a mean pipeline stage, per replica."""

    dense_bytes: float
    """Weights that every token meets, without the embedding table."""
    expert_bytes: float
    """All routed experts that the rank holds."""
    experts: int
    chosen: int
    token_flops: float
    """Of one token: two for each parameter that it is multiplied by, the head's too."""
    holder: Holder
    head_flops: float = 0.0
    """Of these the head's, which a prompt's last token alone is multiplied by."""
    sharers: int = 1
    """Replicas whose tokens choose among the same experts."""

    @property
    def layout(self) -> CacheLayout:
        """How the ranks cut it."""
        return self.holder.layout

    def weights_bytes(self, batch: float) -> float:
        """Read in a step of so many tokens a replica: of the experts those that some token chooses, on average,
        if all are chosen alike."""
        unchosen = 1 - self.chosen / self.experts
        missed = unchosen ** (batch * self.sharers) if self.experts > 1 else 0.0
        return self.dense_bytes + self.expert_bytes * (1 - missed)

    def cache_bytes(self, context: int) -> float:
        """Read for one request, states written too: what the mathematics needs, or less where the engine holds
        less (states in 16 bits). Of a mean stage, as the weights are."""
        return _cache(self.holder, max(1, context)) / self.layout.pp

    def attention_flops(self, context: int) -> float:
        """Of one token with so many before it."""
        return _attention(self.layout, context, self.holder.encoder_at(context))


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A rank's peaks, and the shares of them that are reached."""

    bandwidth: float
    flops: float | None
    """None: no rate is known, and a step is taken to be bound by reading."""
    read_efficiency: float = READ_EFFICIENCY
    compute_efficiency: float = COMPUTE_EFFICIENCY
    overhead_s: float = OVERHEAD_NS / 1e9
    basis: str = "assumed"
    """Whose shares: `assumed`, `given` or `measured`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A decode step of so many requests, each of this context."""

    batch: float
    context: int
    tpot_s: float
    output_tokens_per_s: float
    weights_bytes: float
    cache_bytes: float
    flops: float
    binds: str
    """`bandwidth` or `compute`."""


def speed(loads: Loads, machine: Machine, *, batch: float, context: int) -> Speed:
    """Seconds of a token of each request, and tokens a second of the replica."""
    pp = loads.layout.pp
    part = max(1.0, batch / pp)  # of the requests on each stage at a time
    weights, cache = loads.weights_bytes(part), part * loads.cache_bytes(context)
    flops = part * (loads.token_flops + loads.attention_flops(context))
    reading = (weights + cache) / machine.bandwidth / machine.read_efficiency
    computing = flops / machine.flops / machine.compute_efficiency if machine.flops else 0.0
    step = machine.overhead_s / pp + max(reading, computing)
    return Speed(
        batch=batch,
        context=context,
        tpot_s=pp * step,
        output_tokens_per_s=batch / (pp * step),
        weights_bytes=weights,
        cache_bytes=cache,
        flops=flops,
        binds="bandwidth" if reading >= computing else "compute",
    )


def step_s(
    loads: Loads, machine: Machine, *, batch: float, context: int, chunk: float = 0.0,
    attended: int = 0, read: int = 0,
) -> float:  # fmt: skip
    """Seconds of a step of one stage that decodes a batch and computes `chunk` tokens of prompts, each of which
    attends to `attended` tokens, and reads the cache of `read` tokens of them."""
    tokens = batch + chunk
    reading = loads.weights_bytes(tokens) + batch * loads.cache_bytes(context)
    reading += loads.cache_bytes(read) if read else 0
    flops = tokens * loads.token_flops - chunk * loads.head_flops
    flops += batch * loads.attention_flops(context) + chunk * loads.attention_flops(attended)
    computing = flops / machine.flops / machine.compute_efficiency if machine.flops else 0.0
    return machine.overhead_s + max(
        reading / machine.bandwidth / machine.read_efficiency, computing
    )


def memory_bound_below(loads: Loads, machine: Machine, context: int) -> int | None:
    """The least batch at which computing takes as long as reading; None: at no batch does it."""

    def computes(batch: int) -> bool:
        return speed(loads, machine, batch=batch, context=context).binds == "compute"

    if not computes(MOST_BATCH):
        return None
    low, high = 1, MOST_BATCH
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle + 1, high)
    return low


def ridge(machine: Machine) -> float | None:
    """FLOPs a byte above which the peak rate, not the peak bandwidth, is the limit."""
    return machine.flops / machine.bandwidth if machine.flops else None


def attention_intensity(loads: Loads, context: int) -> float | None:
    """FLOPs of attention a byte of cache: the GQA ratio in 16 bits, whatever batch and context."""
    if any(entry.kind in ("indexer", "compressed") for entry in loads.layout.shape.layers):
        return None  # what is selected is read alone
    layout = replace(loads.layout, pp=1, pp_layers=())
    attended = ideal.rank_bytes(layout, max(1, context), loads.holder.encoder_at(context))
    cache = (attended - _states(layout)) / loads.layout.pp
    return loads.attention_flops(context) / cache if cache > 0 else None


@lru_cache(maxsize=1024)
def _cache(holder: Holder, tokens: int) -> int:
    """Of all stages, on one of the ranks that share each."""
    whole = replace(holder, layout=replace(holder.layout, pp=1, pp_layers=()))
    read = ideal.rank_bytes(whole.layout, tokens, whole.encoder_at(tokens))
    held = needs_of(whole, tokens).request_bytes
    return min(read, held) + min(_states(whole.layout), held)


@lru_cache(maxsize=1024)
def _states(layout: CacheLayout) -> int:
    """Constant states are read and written, but nothing attends to them."""
    return ideal.size(layout, context=1, encoder=0).state_bytes // layout.tp


@lru_cache(maxsize=1024)
def _attention(layout: CacheLayout, context: int, encoder: int) -> float:
    """A batch is looked for in many steps of one context."""
    whole = sum(pair_flops(entry) * _seen(entry, context, encoder) for entry in layout.shape.layers)
    return whole / layout.tp / layout.pp


def weights_intensity(loads: Loads, batch: float) -> float:
    """FLOPs of the weights a byte of them, on a stage: about the batch in 16 bits."""
    part = max(1.0, batch / loads.layout.pp)
    return part * loads.token_flops / loads.weights_bytes(part)


def pair_flops(entry: LayerCache) -> int:
    """FLOPs of one query token and one that it attends to: scores and weighted sum.

    A latent is attended to as it is cached, its expansion absorbed into the projections (DeepSeek-V2,
    arXiv 2405.04434, section 2.1.2): the query heads meet the latent and the RoPE key, and sum the latent.
    """
    if entry.kind == "latent":
        return 2 * entry.query_heads * (2 * entry.k_head_dim + entry.v_head_dim)
    return 2 * entry.query_heads * (entry.mha_k_dim + entry.mha_v_dim)


def _seen(entry: LayerCache, context: int, encoder: int) -> int:
    if entry.kind in ("linear", "indexer"):
        return 0
    if entry.kind == "cross":
        return encoder
    seen = context if entry.window is None else min(context, entry.span or entry.window)
    return seen // entry.stride
