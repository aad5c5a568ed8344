"""What the weights of a planned model take on the fullest rank: as given, as counted, as an engine holds them."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvtool.cache import stages
from kvtool.engine_memory import Line, Range
from kvtool.engine_memory.loading import held, left_behind
from kvtool.errors import usage_error
from kvtool.plan import fixed
from kvtool.plan_loads import bytes_of, sharers_of
from kvtool.units import format_bytes

if TYPE_CHECKING:
    from kvtool.plan_model import PlanModel
    from kvtool.plan_query import PlanQuery, Split
    from kvtool.weights.stored import Stored


def weights_line(model: PlanModel, query: PlanQuery, split: Split, engine: str) -> Line:
    """Of the fullest rank: as given, an equal share; as counted, by how each part is cut."""
    ranks = split.tp * split.pp
    if query.weights is not None:
        each = f", an equal share of {ranks:,} ranks" if ranks > 1 else ""
        return fixed(
            "weights", -(-query.weights // ranks), f"--weights as given{each}: nothing is added"
        )
    if model.stored is None:
        assert model.exact is not None, "checked: there are weights"
        return fixed(
            "weights", -(-model.exact.bytes // ranks), f"{model.exact.source}, an equal share"
        )
    sharers = sharers_of(query, engine, split)
    if not cuts_experts(model, query, engine, split.tp * sharers):
        columns = " or ".join(f"{one:,}" for one in sorted(_columns(model.stored)))
        raise usage_error(
            f"{model.subject.name}: experts of {columns} columns are not cut over {split.tp * sharers:,} ranks"
            + (f" in whole blocks of {model.block}" if model.block > 1 else ""),
            "add --ep, which spreads whole experts, or ask for other --tp or --dp",
        )
    counted, more = _counted(model, query, split, engine)
    basis = model.stored.basis
    if model.exact is not None:  # cut as what was counted is
        counted = -(-counted * model.exact.bytes // bytes_of(model.stored))
        basis = model.exact.source
    left = left_behind(engine, split.gpu, counted, model.stored, model.shape.model_type)
    if more:
        basis += f"; {format_bytes(more)} of padding and copies besides, as {engine} holds them"
    if left.high:
        basis += f"; what loading leaves behind on {split.gpu.vendor} is counted too: an estimate"
    whole = counted + more
    return Line(name="weights", range=Range(whole, whole, whole) + left, basis=basis)


def _counted(model: PlanModel, query: PlanQuery, split: Split, engine: str) -> tuple[int, int]:
    """Bytes of the fullest rank as stored, and what the engine's own form adds."""
    assert model.stored is not None, "asked before"
    spread = split.tp * sharers_of(query, engine, split)
    experts = spread if query.expert_parallel or spread > split.tp else 1  # 1: cut like the rest
    kept = held(
        engine, model.stored, model.shape, model.dtype, split.gpu, model.sizes.hidden,
        1 if query.expert_parallel else spread,
    )  # fmt: skip
    at = (model.shape.num_modules, split.tp, split.pp, experts)
    count = _rank_bytes(model.stored, *at)
    return count, _rank_bytes(kept, *at) - count


@lru_cache(maxsize=1024)
def _columns(weights: Stored) -> frozenset[int]:
    """Of an expert, by which tensor parallelism cuts it."""
    return frozenset(one.part.pieces for one in weights.parts if one.part.role == "experts")


def cuts_experts(model: PlanModel, query: PlanQuery, engine: str, ranks: int) -> bool:
    """Whether vLLM cuts experts that are not spread over so many ranks: into equal parts of whole blocks of
    the weights' scales (vLLM's fp8.py and fused_moe/layer.py assert both)."""
    if engine != "vllm" or query.expert_parallel or model.stored is None:
        return True
    block = model.block if query.weights is None else 1
    return all(
        columns % ranks == 0 and columns // ranks % block == 0 for columns in _columns(model.stored)
    )


@lru_cache(maxsize=1024)
def _rank_bytes(weights: Stored, modules: int, tp: int, pp: int, experts: int) -> int:
    """The sum over its parts, the same for every context and KV dtype."""
    return weights.rank_bytes(tp, stages(modules, pp), experts)
