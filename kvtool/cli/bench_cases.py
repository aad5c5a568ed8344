"""The words of `kvtool bench attention` as cases."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.bench.attention.case import (
    HEAD_DIMS,
    KV_DTYPES,
    LAYOUTS,
    PATTERNS,
    Case,
    check,
    check_block_size,
)
from kvtool.bench.device import Device
from kvtool.cli.options import names_in
from kvtool.cli.scheduler_options import check_rows
from kvtool.errors import KvtoolError, usage_error
from kvtool.units import parse_counts

MOST_CASES = 1_000
DEFAULT_HEADS = (32, 8, 128)
"""Query heads, KV heads and head size of Llama-3-8B."""
MOST_TOKENS = 2**31 - 1
"""Of a sequence: lengths are int32."""
MOST_SEQUENCES = 65_535
"""In one launch of a kernel."""


def cases_of(given: Mapping[str, Any], device: Device) -> tuple[list[Case], list[str]]:
    """Every combination of the lists in the order given, and what must be said of them."""
    heads, notes = _heads(given)
    lists: tuple[Sequence[Any], ...] = (
        parse_counts(given["batch"], name="--batch", high=MOST_SEQUENCES),
        parse_counts(given["context"], name="--context", high=MOST_TOKENS),
        heads,
        block_sizes(given["block_size"]),
        names_in(given["pattern"], "--pattern", PATTERNS),
        _dtypes(given["kv_dtype"], device),
        _layouts(given["layout"], device),
        parse_counts(given["num_splits"], name="--num-splits", low=0, high=128),
        parse_counts(given["num_stages"], name="--num-stages", low=0, high=8),
        parse_counts(given["skew"], name="--skew", high=2**20),
        threads_of(given["threads"], device) if not device.is_gpu else [None],
    )
    check_rows(lists, MOST_CASES)
    cases = []
    for (
        batch,
        context,
        head,
        size,
        pattern,
        dtype,
        layout,
        splits,
        stages,
        skew,
        threads,
    ) in itertools.product(*lists):
        case = Case(
            batch=batch, context_tokens=context, query_heads=head[0], kv_heads=head[1],
            head_dim=head[2], block_size=size, pattern=pattern, kv_dtype=dtype, layout=layout,
            num_splits=splits or None, num_stages=stages or None, skew=skew, threads=threads,
        )  # fmt: skip
        check(case)
        cases.append(case)
    idle = ("threads",) if device.is_gpu else ("num_splits", "num_stages")
    whose = "CPU" if device.is_gpu else "GPU"
    notes += [
        f"--{name.replace('_', '-')} changes nothing here: it is the {whose} kernel's"
        for name in idle
        if given[name] not in ("0", "1")
    ]
    return list(dict.fromkeys(cases)), notes


def block_sizes(typed: str) -> list[int]:
    """The block sizes, each a power of two that a kernel is made for."""
    sizes = parse_counts(typed, name="--block-size", low=0, high=2**20)
    for size in sizes:
        check_block_size(size)
    return sizes


def threads_of(typed: str, device: Device) -> list[int]:
    """Threads of the CPU: more than it has cores would measure the system's scheduler."""
    return parse_counts(typed, name="--threads", high=max(device.processors, 1))


def _dtypes(typed: str, device: Device) -> list[str]:
    default = "bf16" if device.is_gpu else "fp32"
    return [default] if typed == "auto" else names_in(typed, "--kv-dtype", tuple(KV_DTYPES))


def _layouts(typed: str, device: Device) -> list[str]:
    default = "nhd" if device.is_gpu else "hnd"
    return [default] if typed == "auto" else names_in(typed, "--layout", LAYOUTS)


def _heads(given: Mapping[str, Any]) -> tuple[list[tuple[int, int, int]], list[str]]:
    """(query heads, KV heads, head size), from the options or from a model."""
    typed = {name: given[name] for name in ("query_heads", "kv_heads", "head_dim")}
    if given["model"] is None:
        lists = [
            parse_counts(value, name=f"--{name.replace('_', '-')}", high=2**16)
            if value is not None
            else [default]
            for (name, value), default in zip(typed.items(), DEFAULT_HEADS, strict=True)
        ]
        return [(q, kv, size) for q, kv, size in itertools.product(*lists)], []
    both = [f"--{name.replace('_', '-')}" for name, value in typed.items() if value is not None]
    if both:
        raise usage_error(f"--model and {both[0]} contradict each other", "give one of them")
    return _heads_of(given["model"])


def _heads_of(model: str) -> tuple[list[tuple[int, int, int]], list[str]]:
    """The heads that most of a model's attention layers have."""
    from kvtool import catalog
    from kvtool.config import load_config
    from kvtool.model import read_model

    loaded = load_config(model)
    shape = read_model(loaded.config, catalog.class_defaults()["types"])
    plain = [one for one in shape.layers if one.kind in ("full", "sliding") and one.query_heads]
    if not plain:
        kinds = ", ".join(dict.fromkeys(one.kind for one in shape.layers))
        raise KvtoolError(
            f"{loaded.name}: no layer has plain K and V for a decode kernel (kinds: {kinds})",
            "latent caches have no kernel here yet; give --query-heads, --kv-heads and --head-dim",
            code="no_kernel",
        )
    counts = Counter(
        (one.query_heads, one.kv_heads, one.k_head_dim, one.v_head_dim) for one in plain
    )
    (query_heads, kv_heads, k_dim, v_dim), number = counts.most_common(1)[0]
    if k_dim != v_dim or k_dim not in HEAD_DIMS:
        raise KvtoolError(
            f"{loaded.name}: its heads are {k_dim} (K) and {v_dim} (V) wide, and no kernel here is",
            f"the head sizes are {', '.join(map(str, HEAD_DIMS))}, the same for K and V",
            code="no_kernel",
        )
    notes = list(loaded.notes)
    windows = [one.window for one in plain if one.window]
    if windows:
        notes.append(
            f"{loaded.name}: {len(windows)} of its {len(shape.layers)} layers see at most "
            f"{max(windows):,} tokens; what is measured is a layer that sees the whole context"
        )
    if number < len(shape.layers):
        notes.append(
            f"{loaded.name}: these are the heads of {number} of its {len(shape.layers)} layers"
        )
    return [(query_heads, kv_heads, k_dim)], notes
