"""`--solve`: values by hand with a memory that is given, and that no better value fits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned_models import asked, model

from kvtool.capacity import least
from kvtool.errors import KvtoolError
from kvtool.fitting import count_of, fitting, on, plan_first, splits
from kvtool.plan_query import PlanQuery, Split, gpus_named
from kvtool.solving import KV_LADDER, SOLVERS, Solved, queries_of, solve
from kvtool.units import GIB

SMALL = "llama-3.1-8b"
"""A token takes 2 × 8 KV heads × 128 × 2 bytes × 32 layers = 128 KiB in bf16: 8k tokens are 1 GiB."""
ROOM = 20 * GIB


def solved(what: str, gpu: str = "h100", engine: str = "ideal", **more: Any) -> Solved:
    query = asked(gpu, engine, **{"kv_memory": ROOM, "contexts": (8192,), **more})
    return solve(what, model(SMALL), query)


@pytest.mark.parametrize(
    ("users", "tokens"), [(4, 40960), (None, 131072), (20, 8192), (21, 7801), (1, 131072)]
)
def test_the_longest_context_of_so_many_users(users: int | None, tokens: int) -> None:
    found = solved("context", users=(users,))
    assert (found.value, found.flags) == (tokens, f"--context {tokens}")
    assert found.plan.case.context == tokens
    assert found.plan.fits


def test_vllm_gives_whole_blocks_and_allow_long_goes_on() -> None:
    # 10,240 blocks of 16 tokens, 487 for each of 21.
    found = solved("context", engine="vllm", users=(21,))
    assert found.value == ROOM // (16 * 128 * 1024) // 21 * 16 == 7792
    assert solved("context", allow_long=True).value == 163840
    assert solved("context").value == 131072


@pytest.mark.parametrize(
    ("more", "users"),
    [
        ({}, 20), ({"contexts": (8193,)}, 19), ({"kv_dtypes": ("fp8",)}, 40),
        ({"dps": (3,), "gpus": gpus_named("h100:3")}, 60), ({"max_num_seqs": 7}, 7),
        ({"max_num_seqs": 7, "dps": (2,), "gpus": gpus_named("h100:2")}, 14),
        ({"users": (3,)}, 20),
    ],
)  # fmt: skip
def test_the_most_users_at_a_context(more: dict[str, Any], users: int) -> None:
    query = replace(asked("h100", kv_memory=ROOM, contexts=(8192,)), **more)
    found = solve("batch", model(SMALL), query)
    assert (found.value, found.flags) == (users, f"--batch {users}")
    assert found.plan.fits
    assert found.plan.case.users == users


def test_the_null_block_is_no_requests() -> None:
    # 5 GiB are five requests of 512 blocks, of which vLLM sets one aside: four run.
    assert solved("batch", engine="vllm", kv_memory=5 * GIB).value == 4
    assert solved("batch", engine="vllm", kv_memory=5 * GIB + 16 * 128 * 1024).value == 5
    assert solved("batch", kv_memory=5 * GIB).value == 5


@pytest.mark.parametrize(
    ("users", "dtype"), [(20, "auto"), (21, "fp8"), (40, "fp8"), (41, "int4"), (75, "int4")]
)
def test_the_first_kv_dtype_that_fits(users: int, dtype: str) -> None:
    # int8 takes 132 bytes a head where fp8 takes 128, int4 68: 8k tokens 0.516 and 0.266 GiB.
    found = solved("kv-dtype", users=(users,))
    assert (found.value, found.flags) == (dtype, f"--kv-dtype {dtype}")
    assert found.plan.fits


def test_keys_and_values_apart_come_last_and_an_engine_has_what_it_has() -> None:
    # K 68 and V 36 bytes a head: 0.203 GiB, of which 98 fit.
    assert solved("kv-dtype", users=(98,)).value == "int4/int2"
    none = solved("kv-dtype", engine="vllm", users=(41,))
    assert none.value is None
    assert none.plan.case.holder.layout.kv.name == "fp8"
    block = none.plan.holds.bytes_per_block or 0  # that vLLM sets aside
    assert none.plan.missing_bytes == GIB // 2 + block
    assert none.error is not None
    assert (none.error.code, none.error.exit_code) == ("does_not_fit", 1)
    assert "no KV dtype of vllm fits 41 users at 8,192 tokens" in none.error.message
    assert "513.00 MiB" in none.error.message


@pytest.mark.parametrize(
    ("more", "flags"),
    [
        ({"users": (20,)}, "--gpu h100-sxm:1 --tp 1"),
        ({"users": (64,)}, "--gpu h100-sxm:4 --tp 4"),
        # 11 of 32 layers are on a stage of three: 58 × 11 / 32 = 19.9 GiB. Three replicas of 20 are as few.
        ({"users": (58,)}, "--gpu h100-sxm:3 --tp 1 --dp 3"),
        ({"users": (58,), "dps": (1,)}, "--gpu h100-sxm:3 --tp 1 --pp 3"),
        ({"users": (59,), "dps": (1,)}, "--gpu h100-sxm:4 --tp 4"),
        ({"users": (64,), "tps": (1,)}, "--gpu h100-sxm:4 --tp 1 --dp 4"),
        ({"users": (64,), "tps": (2,)}, "--gpu h100-sxm:4 --tp 2 --dp 2"),
        ({"users": (64,), "tps": (2,), "dps": (1,)}, "--gpu h100-sxm:4 --tp 2 --pp 2"),
        ({"users": (None,), "contexts": (131072,)}, "--gpu h100-sxm:1 --tp 1"),
    ],
)
def test_the_fewest_gpus(more: dict[str, Any], flags: str) -> None:
    found = solved("gpus", gpu="h100:7", **more)
    assert found.flags == flags
    assert found.value == found.plan.case.gpus
    assert found.plan.fits


def test_a_latent_is_not_cut_by_tensor_parallelism() -> None:
    # With tp 8 every rank keeps all latents: 512 × 8,192 × 1,152 bytes × 61 layers are 275 GiB. Nine stages
    # of seven layers hold 31.5 GiB each, beside 72 of weights in fp8.
    query = asked("h200", "vllm", users=(512,), contexts=(8192,))
    found = solve("gpus", model("deepseek-v3"), query)
    assert found.flags == "--gpu h200:9 --tp 1 --pp 9"
    wide = plan_first(
        model("deepseek-v3"),
        on(query, Split(gpu=query.gpus[0].preset, tp=8, pp=2, replicas=1)),
    )
    assert not wide.fits


def test_no_number_of_gpus_and_the_nearest_miss() -> None:
    found = solved("gpus", users=(1,), contexts=(131072,), kv_memory=1000)
    assert found.value is None
    assert found.error is not None
    assert "no number of h100-sxm fits 1 user at 131,072 tokens" in found.error.message
    # tp 8 and 32 stages, a layer of one head each: 131,072 × 2 × 128 × 2 bytes.
    assert found.plan.missing_bytes == 131072 * 512 - 1000
    assert found.plan.case.gpus == 8 * 32
    with pytest.raises(KvtoolError, match="does not divide") as error:
        solved("gpus", tps=(3,))
    assert error.value.code == "tp_does_not_divide"


def test_more_gpus_do_not_help_an_engine_of_one_process() -> None:
    # 131 GiB of weights on one H100, however many there are: not 64 of them for 64 users.
    query = asked("h100", "transformers", users=(64,), contexts=(8192,))
    found = solve("gpus", model("llama-3-70b"), query)
    one = plan_first(model("llama-3-70b"), replace(query, users=(None,)))
    assert (found.value, found.plan.case.gpus) == (None, 1)
    assert found.error is not None
    assert f"1 × h100-sxm lacks {one.missing_bytes / GIB:.2f} GiB a GPU" in found.error.message
    assert "more GPUs do not help: transformers runs in one process" in found.error.message
    assert "more or larger" not in found.error.hint
    # Replicas that were asked for are those that are planned.
    given = solve("gpus", model("llama-3-70b"), replace(query, dps=(2,)))
    assert given.plan.case.gpus == 2


def test_the_lowest_share_of_the_memory() -> None:
    query = asked("h100", "vllm", users=(16,), contexts=(8192,))
    found = solve("utilisation", model(SMALL), query)
    shares = [share / 100 for share in range(1, 96)]
    plans = [plan_first(model(SMALL), replace(query, utilizations=(one,))) for one in shares]
    first = next(one for one, plan in zip(shares, plans, strict=True) if plan.fits)
    assert found.value == first == 0.43  # (14.96 + 16 + 3.1 GiB) / 79.18 GiB
    assert found.flags == "--gpu-memory-utilization 0.43"
    assert found.plan.longest is not None
    assert 8192 <= found.plan.longest < 9000


def test_what_has_no_share_and_what_is_not_known() -> None:
    with pytest.raises(KvtoolError, match="ideal takes no share") as error:
        solved("utilisation", kv_memory=None)
    assert error.value.exit_code == 2
    with pytest.raises(KvtoolError, match="whatever the share"):
        solved("utilisation", engine="vllm")
    with pytest.raises(KvtoolError, match="nothing is called 'utilization'") as error:
        solved("utilization")
    assert "Did you mean utilisation" in error.value.hint


def test_a_model_that_is_too_large_says_what_is_in_the_way() -> None:
    query = asked("h100", "vllm", users=(64,), contexts=(8192,))
    for what in ("context", "batch", "kv-dtype", "utilisation"):
        found = solve(what, model("llama-3-70b"), query)
        assert found.value is None
        assert found.error is not None
        assert found.error.code == "does_not_fit"
        assert "weights" in found.error.hint
        assert not found.plan.fits
    assert solve("gpus", model("llama-3-70b"), query).value == 5


def test_a_context_beyond_the_model_is_refused() -> None:
    for what in ("batch", "gpus", "kv-dtype"):
        with pytest.raises(KvtoolError, match="above the model's maximum"):
            solved(what, contexts=(2**20,))


def test_lists_are_a_query_each_but_for_what_is_missing() -> None:
    query = asked("h100,l4", contexts=(1024, 2048), users=(1, 2, 3), kv_dtypes=("auto", "fp8"))
    assert len(list(queries_of("gpus", query))) == 24
    found = list(queries_of("batch", query))
    assert len(found) == 8
    assert {one.users for one in found} == {(1,)}
    assert [one.contexts for one in found][:2] == [(1024,), (2048,)]
    bare = list(queries_of("kv-dtype", asked("h100")))
    assert [(one.contexts, one.kv_dtypes) for one in bare] == [((), ("auto",))]
    assert solve("kv-dtype", model(SMALL), bare[0]).plan.case.context == 8192


MODELS = ("llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-120b", "gemma-3-27b", "deepseek-v3")
ASKED = st.fixed_dictionaries({
    "name": st.sampled_from(MODELS),
    "gpu": st.sampled_from(("h100", "a100-40gb", "l4", "h200", "mi300x")),
    "engine": st.sampled_from(("ideal", "vllm")),
    "users": st.one_of(st.none(), st.integers(1, 200)),
    "context": st.integers(1, 32768),
    "ep": st.booleans(),
})  # fmt: skip


def query_of(drawn: dict[str, Any], **more: Any) -> PlanQuery:
    return asked(
        drawn["gpu"], drawn["engine"], contexts=(drawn["context"],), users=(drawn["users"],),
        expert_parallel=drawn["ep"], **more,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(drawn=ASKED, what=st.sampled_from(tuple(SOLVERS)))
def test_what_is_solved_fits_and_the_next_does_not(drawn: dict[str, Any], what: str) -> None:
    assume(what != "utilisation" or drawn["engine"] == "vllm")
    named, query = model(drawn["name"]), query_of(drawn)
    found = solve(what, named, query)
    assert (found.error is None) == found.plan.fits == (found.value is not None)
    if found.value is not None:
        assert not any(one.fits for one in _next(named, query, found))


def _next(named: Any, query: PlanQuery, found: Solved) -> list[Any]:
    """Plans with the next better value, if there is one."""
    value: Any = found.value
    if found.what == "context":
        more = [replace(query, contexts=(value + 1,))] if value < named.shape.max_context else []
    elif found.what == "batch":
        more = [replace(query, users=(value + 1,))]
    elif found.what == "utilisation":
        more = [replace(query, utilizations=(round(value - 0.01, 2),))] if value > 0.01 else []
    elif found.what == "kv-dtype":
        before = KV_LADDER[: KV_LADDER.index(value)]
        more = [replace(query, kv_dtypes=(one,)) for one in before]
    else:
        gpu = query.gpus[0].preset
        most = max(query.users[0] or 1, 64 if query.expert_parallel else 1)
        more = [on(query, one) for one in splits(gpu, value - 1, most_replicas=most)]
    plans = []
    for one in more:
        try:
            plans.append(plan_first(named, one))
        except KvtoolError:  # a cut that the model does not have, a dtype of another engine
            continue
    return plans


@settings(max_examples=40, deadline=None)
@given(drawn=ASKED, tp=st.sampled_from((1, 2, 4, 8)), pp=st.integers(1, 5), dp=st.integers(1, 4))
def test_the_quick_question_has_the_plans_answer(
    drawn: dict[str, Any], tp: int, pp: int, dp: int
) -> None:
    named, query = model(drawn["name"]), query_of(drawn)
    split = Split(gpu=query.gpus[0].preset, tp=tp, pp=pp, replicas=dp)
    quick = fitting(named, query, drawn["context"], drawn["users"])
    try:
        plan = plan_first(named, on(query, split))
    except KvtoolError:
        assert quick.missing(split) == math.inf
        return
    assert (quick.missing(split) == 0) == plan.fits
    case = quick.case(split)
    assert case == plan.case
    each = 1 if case.users is None else -(-case.users // dp)
    room = least(case.holder, case.context, each)
    exact = replace(query, kv_memory=room)
    assert plan_first(named, on(exact, split)).fits
    assert not plan_first(named, on(replace(query, kv_memory=room - 1), split)).fits


def test_ways_to_share_out_gpus() -> None:
    gpu = gpus_named("h100")[0].preset
    ways = [(one.tp, one.pp, one.replicas) for one in splits(gpu, 8, most_replicas=2)]
    assert ways == [
        (8, 1, 1), (4, 1, 2), (4, 2, 1), (2, 2, 2), (2, 4, 1), (1, 4, 2), (1, 8, 1),
    ]  # fmt: skip
    assert [count_of(one) for one in splits(gpu, 3)] == [3]
