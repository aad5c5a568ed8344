"""What the launchers refuse, before anything runs, and what preparing a launch promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

from kvtool.kernels import decode, merge, read, store  # noqa: E402
from kvtool.kernels.decode_plan import Plan  # noqa: E402

PLAN = Plan(tile=64, chunk_tiles=4, num_stages=3, num_warps=4, num_splits=3)


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments that `prepare_paged` takes."""
    cache = torch.zeros(10, 16, 2, 64, dtype=torch.float16)
    return {
        "q": torch.zeros(3, 8, 64, dtype=torch.float16),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "block_table": torch.zeros(3, 3, dtype=torch.int32),
        "lengths": torch.zeros(3, dtype=torch.int32),
        **changes,
    }


def caches(*shape: int, dtype: Any = torch.float16) -> dict[str, Any]:
    """A cache of this shape, and q of its head size and dtype."""
    cache = torch.zeros(shape, dtype=dtype)
    q = torch.zeros(3, 8, shape[3], dtype=dtype)
    return {"q": q, "k_cache": cache, "v_cache": cache}


def padded(*shape: int) -> Any:
    """fp16 zeros whose last dimension is one element of a row of 65."""
    return torch.zeros(*shape[:-1], 65, dtype=torch.float16)[..., : shape[-1]]


REFUSED = {
    "block size 24": (caches(4, 24, 2, 64), "block_size must be a power of two .* not 24"),
    "block size 0": (caches(4, 0, 2, 64), "block_size must be a power of two .* not 0"),
    "block size 512": (caches(4, 512, 2, 64), "not 512"),
    "head size 72": (caches(4, 16, 2, 72), "head_dim must be one of 64, 80, .* not 72"),
    "float64": (caches(4, 16, 2, 64, dtype=torch.float64), "q must be fp16, bf16 or fp32"),
    "heads that do not divide": (caches(4, 16, 3, 64), "multiple of KV heads"),
    "no KV head": (caches(4, 16, 0, 64), "multiple of KV heads"),
    "a cache of another dtype": (
        {"k_cache": torch.zeros(10, 16, 2, 64), "v_cache": torch.zeros(10, 16, 2, 64)},
        "one dtype",
    ),
    "a cache of another head size": (
        {"q": torch.zeros(3, 8, 128, dtype=torch.float16)},
        "q has head_dim 128",
    ),
    "K and V of two shapes": (
        {"v_cache": torch.zeros(11, 16, 2, 64, dtype=torch.float16)},
        "k_cache and v_cache must have one shape",
    ),
    "K and V of two layouts": (
        {"v_cache": torch.zeros(10, 2, 16, 64, dtype=torch.float16).transpose(1, 2)},
        "the same strides",
    ),
    "odd strides": ({"k_cache": padded(10, 16, 2, 64)}, "multiples of 16 elements"),
    "a transposed head": (
        {"k_cache": torch.zeros(10, 16, 64, 2, dtype=torch.float16).transpose(2, 3)},
        "last dimension must have stride 1",
    ),
    "an odd address": (
        {"q": torch.zeros(3 * 8 * 64 + 1, dtype=torch.float16)[1:].view(3, 8, 64)},
        "q: the address must be a multiple of 16 bytes",
    ),
    "odd strides of q": ({"q": padded(3, 8, 64)}, "q: strides must be multiples of 16"),
    "a flat q": ({"q": torch.zeros(3, 512, dtype=torch.float16)}, "q must be"),
    "a flat cache": ({"k_cache": torch.zeros(10, 64, dtype=torch.float16)}, "4 dimensions"),
    "a table of 64 bits": (
        {"block_table": torch.zeros(3, 3, dtype=torch.int64)},
        "block_table must be int32",
    ),
    "a table of another batch": (
        {"block_table": torch.zeros(2, 3, dtype=torch.int32)},
        r"block_table must have the shape \[batch, max_blocks\]",
    ),
    "lengths of 64 bits": ({"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths must be"),
    "lengths of another batch": ({"lengths": torch.zeros(4, dtype=torch.int32)}, "lengths"),
    "a negative window": ({"window": -1}, "window"),
    "half a window": ({"window": 1.5}, "window"),
    "a window beyond int32": ({"window": 2**40}, "window"),
    "a scale that is no number": ({"scale": float("nan")}, "scale"),
    "a scale in words": ({"scale": "1"}, "scale"),
    "no context": ({"max_context": 0}, "max_context"),
    "a plan in words": ({"plan": "mine"}, "plan must be a Plan"),
    "out of another dtype": ({"out": torch.zeros(3, 8, 64, dtype=torch.bfloat16)}, "out must be"),
    "out with gaps": ({"out": padded(3, 8, 64)}, "out must be contiguous"),
    "out of another shape": ({"out": torch.zeros(3, 8, 65)}, "out must have the shape"),
    "lse of another dtype": ({"lse": torch.zeros(3, 8, dtype=torch.float16)}, "lse must be"),
    "a workspace of two splits": (
        {"workspace": (torch.zeros(2, 3, 8, 64), torch.zeros(2, 3, 8)), "plan": PLAN},
        "room for 2 splits, not 3",
    ),
    "two devices": ({"lengths": torch.zeros(3, dtype=torch.int32, device="meta")}, "devices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_paged_launch_is_refused(name: str) -> None:
    changes, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        decode.prepare_paged(**arguments(**changes))


def test_a_contiguous_launch_is_refused() -> None:
    k = torch.zeros(4, 16, 2, 64, dtype=torch.float16)
    q, lengths = k.new_zeros(3, 8, 64), torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="k holds 4 sequences and q 3"):
        decode.prepare_contiguous(q, k, k, lengths)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tile": 24}, "tile"),
        ({"tile": 8}, "tile"),
        ({"walk": "wild"}, "walk must be one of chunked, naive"),
        ({"num_splits": 0}, "num_splits"),
        ({"num_splits": 10**6}, "num_splits"),
        ({"num_warps": 3}, "num_warps"),
        ({"num_stages": 99}, "num_stages"),
    ],
)
def test_a_plan_is_refused(changes: dict[str, Any], text: str) -> None:
    sizes = {"tile": 64, "chunk_tiles": 4, "num_stages": 3, "num_warps": 4, "num_splits": 1}
    with pytest.raises(ValueError, match=text):
        Plan(**{**sizes, **changes})


def others() -> dict[str, tuple[Callable[[], Any], str]]:
    """Refusals of the other kernels."""
    k = torch.zeros(5, 2, 64)
    cache, slots = torch.zeros(4, 16, 2, 64), torch.zeros(5, dtype=torch.int32)
    outs, logs = torch.zeros(2, 3, 4, 64), torch.zeros(2, 3, 4)
    return {
        "slots": (lambda: store.prepare(k, k, cache, cache, slots[:4]), "slots"),
        "dtype": (lambda: store.prepare(k.half(), k, cache, cache, slots), "one dtype"),
        "float slots": (lambda: store.prepare(k, k, cache, cache, slots.float()), "int32 or int64"),
        "block": (lambda: store.prepare(k, k, cache[:, :3], cache[:, :3], slots), "power of two"),
        "parts": (lambda: merge.prepare(outs, logs[:1]), "part_lse"),
        "merged": (lambda: merge.prepare(outs, logs, out=outs[0, :2]), "out"),
        "odd bytes": (lambda: read.prepare(torch.zeros(3)), "64 bytes"),
        "gaps": (lambda: read.prepare(torch.zeros(64, 2)[:, 0]), "contiguous"),
    }


@pytest.mark.parametrize("name", others())
def test_the_other_kernels_refuse(name: str) -> None:
    call, text = others()[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_preparing_takes_what_is_given_and_allocates_nothing_else() -> None:
    given = arguments(plan=PLAN)
    out, lse = torch.zeros(3, 8, 64), torch.zeros(3, 8)
    room = decode.workspace_for(given["q"], PLAN)
    assert room is not None
    assert [tuple(part.shape) for part in room] == [(3, 3, 8, 64), (3, 3, 8)]
    made = decode.prepare_paged(**given, out=out, lse=lse, workspace=room)
    assert made.out is out
    assert made.lse is lse
    splitting, merging = made.launches
    assert splitting.arguments["out"] is merging.arguments["part_out"] is room[0]
    assert splitting.arguments["lse"] is merging.arguments["part_lse"] is room[1]
    assert merging.arguments["out"] is out
    assert splitting.grid == (2, 3, 3)


def test_one_split_needs_no_workspace_and_no_merge() -> None:
    plan = Plan(tile=64, chunk_tiles=4, num_stages=3, num_warps=4, num_splits=1)
    given = arguments(plan=plan)
    assert decode.workspace_for(given["q"], plan) is None
    assert len(decode.prepare_paged(**given).launches) == 1


def test_odd_strides_of_dimensions_with_one_element_do_not_matter() -> None:
    cache = torch.zeros(17 * 64, dtype=torch.float16)[: 16 * 64]
    view = torch.as_strided(cache, (1, 16, 1, 64), (7, 64, 3, 1))
    q = torch.zeros(1, 8, 64, dtype=torch.float16)
    made = decode.prepare_paged(
        q, view, view, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    )
    kept = made.launches[0].arguments
    assert (kept["stride_block"], kept["stride_token"], kept["stride_head"]) == (0, 64, 0)
