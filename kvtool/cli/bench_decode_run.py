"""The run of `kvtool bench decode`: what was typed as cases, and their rows one at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvtool.bench.attention.case import KV_DTYPES
from kvtool.bench.decode.failures import named_failure
from kvtool.bench.decode.settings import (
    CACHES,
    CPU_CONTEXTS,
    DEFAULT_LAYERS,
    DEFAULT_MODEL,
    DTYPES,
    GPU_CONTEXTS,
    DecodeCase,
    DecodeRun,
    ModelChoice,
    RaggedRun,
    Roofs,
    decode_cases,
    made_requests,
)
from kvtool.bench.device import Device, describe, find_device
from kvtool.bench.roofs import matmul_roof, read_roof
from kvtool.cli.bench_cases import block_sizes
from kvtool.cli.bench_emit import Measured, emit, interrupted, params_in_errors
from kvtool.cli.options import names_in
from kvtool.cli.scheduler_options import check_rows
from kvtool.config import LoadedConfig, load_config
from kvtool.errors import KvtoolError, usage_error
from kvtool.output import Output
from kvtool.run import Row
from kvtool.units import parse_bytes, parse_count, parse_counts

if TYPE_CHECKING:
    from kvtool.bench.decode.blueprint import Blueprint

MOST_TOKENS = 2**24
MOST_CASES = 1_000
RAGGED_MEANS, RESERVATIONS = 4, 2
"""What a ragged run reserves a sequence, in mean lengths, and how many such reservations fit."""
CHECKED = 4
"""Requests that are run once more alone, for their tokens."""


def run_decode(given: Mapping[str, Any], out: Output) -> None:
    """Measure every case, then the requests of different lengths."""
    with params_in_errors(given):
        device = find_device(given["device"])
        env = describe(device, threads=given["threads"])
        measured, notes = measure_decode(given, device, out)
    emit("bench decode", given, env, measured, notes, out)


def measure_decode(
    given: Mapping[str, Any], device: Device, out: Output
) -> tuple[Measured, list[str]]:
    """The rows, what ended them early, and what must be said of them."""
    from kvtool.live import load_libraries

    load_libraries()  # before what imports them at its top
    from kvtool.bench.decode.ragged import ragged_rows, ragged_steps
    from kvtool.bench.decode.uniform import uniform_rows, uniform_steps

    choice = _choice(given, device)
    run = DecodeRun(
        cases=_cases(given),
        threads=given["threads"],
        repeats=given["repeats"],
        exponent_contexts=GPU_CONTEXTS if device.is_gpu else CPU_CONTEXTS,
        seed=given["seed"],
    )
    plan = _plan(given)
    ragged = _ragged(given, plan, choice) if given["num_requests"] else None
    roofs = Roofs(
        read=lambda size: read_roof(device, size, given["threads"]),
        matmul=lambda: matmul_roof(device, choice.dtype, threads=given["threads"]),
    )
    steps = uniform_steps(plan, choice, run) + (ragged_steps(choice, ragged) if ragged else 0)
    with out.progress("bench decode", steps) as bar:

        def advance(done: str) -> None:
            bar(1)

        # Both refuse at once what they know beforehand: not after the other has run.
        parts = [uniform_rows(plan, choice, run, roofs, advance=advance)] if run.cases else []
        if ragged is not None:
            parts.append(ragged_rows(plan, choice, ragged, advance=advance))
        measured = _collected(lambda: itertools.chain(*parts))
    notes = [*plan.notes, *plan.loaded.notes, *_graph_notes(measured.rows)]
    if any(plan.heads.windows):
        notes.append(
            "layers with a window keep all their blocks in our caches; a step reads the window alone"
        )
    return measured, notes + (_first_notes(given) if ragged else [])


def _graph_notes(rows: Sequence[Row]) -> list[str]:
    """Why decode steps that could have been a CUDA graph were not."""
    return [
        f"{row['cache']}, batch {row['batch']}: its decode steps are no CUDA graph: "
        f"{row['graph_error']}"
        for row in rows
        if row["graph_error"] is not None
    ]


def _first_notes(given: Mapping[str, Any]) -> list[str]:
    """Which lists count by their first value in the ragged run."""
    return [
        f"requests of different lengths: around the first --{name.replace('_', '-')}, {counts[0]:,}"
        for name in ("prompt_tokens", "output_tokens")
        if len(counts := _counts(given, name, MOST_TOKENS)) > 1
    ]


def _collected(rows: Callable[[], Iterator[Row]]) -> Measured:
    """Every row that was finished, and what ended them."""
    measured = Measured()
    try:
        with named_failure("bench decode", "--batch, --prompt-tokens, --output-tokens"):
            for row in rows():
                measured.rows.append({"bench": "decode", **row})
    except KeyboardInterrupt:
        measured.failed = interrupted(len(measured.rows), f"{len(measured.rows)} rows")
    except KvtoolError as error:
        if not measured.rows:
            raise
        measured.failed = error
    return measured


def _choice(given: Mapping[str, Any], device: Device) -> ModelChoice:
    default = "bf16" if device.is_gpu else "fp32"
    typed = given["dtype"]
    return ModelChoice(
        device=device.kind,
        dtype=default if typed == "auto" else _dtype(typed),
        seed=given["seed"],
        random_weights=given["random_weights"],
    )


def _dtype(typed: str) -> str:
    names = names_in(typed, "--dtype", DTYPES)
    if len(names) > 1:
        raise usage_error(
            f"--dtype takes one value, not {len(names)}", f"run it once more for {names[1]}"
        )
    return names[0]


def _counts(given: Mapping[str, Any], name: str, high: int) -> tuple[int, ...]:
    return tuple(parse_counts(given[name], name=f"--{name.replace('_', '-')}", high=high))


def _cases(given: Mapping[str, Any]) -> tuple[DecodeCase, ...]:
    lists = (
        tuple(names_in(given["cache"], "--cache", CACHES)),
        _counts(given, "batch", 2**16),
        _counts(given, "prompt_tokens", MOST_TOKENS),
        _counts(given, "output_tokens", MOST_TOKENS),
        tuple(block_sizes(given["block_size"])),
    )
    check_rows(lists, MOST_CASES)
    return decode_cases(*lists, max_tokens=_max_model_len(given))


def _max_model_len(given: Mapping[str, Any]) -> int | None:
    typed = given["max_model_len"]
    return None if typed is None else parse_count(typed, name="--max-model-len", high=MOST_TOKENS)


def _plan(given: Mapping[str, Any]) -> Blueprint:
    """The model that is asked for; a small one, cut short, if none is."""
    from kvtool.bench.decode.blueprint import blueprint

    loaded: LoadedConfig = load_config(given["model"] or DEFAULT_MODEL)
    layers = given["layers"]
    if given["model"] is None and layers is None:
        layers = DEFAULT_LAYERS
    return blueprint(loaded, layers=layers)


def _ragged(given: Mapping[str, Any], plan: Blueprint, choice: ModelChoice) -> RaggedRun:
    """The requests, at the first of the lengths asked for."""
    prompt, output = (
        _counts(given, name, MOST_TOKENS)[0] for name in ("prompt_tokens", "output_tokens")
    )
    most = _max_model_len(given) or min(
        RAGGED_MEANS * (prompt + output), plan.max_context or MOST_TOKENS
    )
    token_bytes = plan.heads.token_bytes(KV_DTYPES[choice.dtype])
    typed = given["kv_memory"]
    return RaggedRun(
        requests=made_requests(
            given["num_requests"], most, prompt_mean=prompt, output_mean=output, seed=given["seed"]
        ),
        kv_budget_bytes=max(RESERVATIONS, given["n"]) * most * token_bytes
        if typed is None
        else parse_bytes(typed, name="--kv-memory"),
        max_model_len=most,
        block_sizes=tuple(block_sizes(given["block_size"])),
        samples=given["n"],
        threads=given["threads"],
        repeats=given["repeats"],
        check_requests=CHECKED,
        seed=given["seed"],
    )
