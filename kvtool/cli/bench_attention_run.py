"""The run of `kvtool bench attention`: cases one after the other, what was measured kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvtool.bench.attention import npz
from kvtool.bench.attention.case import Case
from kvtool.bench.attention.data import make, make_from, memory_of, out_of_memory
from kvtool.bench.attention.forecast import forecast
from kvtool.bench.attention.measure import Found, measure_case
from kvtool.bench.attention.providers import NAMES, ON_REQUEST
from kvtool.bench.cpu.attention import compiles
from kvtool.bench.device import Device, describe, find_device
from kvtool.bench.failures import named_failure
from kvtool.bench.roofs import matmul_roof
from kvtool.cli.bench_cases import cases_of
from kvtool.cli.bench_emit import Measured, emit, interrupted, params_in_errors
from kvtool.cli.options import names_in
from kvtool.errors import KvtoolError, usage_error
from kvtool.guard import stdout_for_data
from kvtool.output import Output, check_not_read, check_writable, write_file
from kvtool.units import parse_seconds

GIVEN_BY_A_FILE = (
    "batch", "context", "query_heads", "kv_heads", "head_dim", "model", "block_size", "kv_dtype",
    "pattern", "skew",
)  # fmt: skip


def run_attention(given: Mapping[str, Any], usual: Mapping[str, Any], out: Output) -> None:
    """Measure the cases, or list them; `usual` are the options as they stand untyped."""
    with params_in_errors(given):
        device = find_device(given["device"])
        inputs = None if given["inputs"] is None else npz.read_inputs(given["inputs"])
        listed, notes = _listed(given, usual, device, inputs)
        _check_files(given, listed, out.path)
        budget_s = parse_seconds(given["budget"], name="--budget")
        env = describe(device, threads=max(case.threads or 0 for case in listed) or None)
        if given["dry_run"]:
            names = _providers(given["provider"])
            rows = [forecast(case, device, names, budget_s / len(listed)) for case in listed]
            measured = Measured(rows=rows)
        else:
            measured = measure_cases(listed, device, given, budget_s, inputs, out)
    emit("bench attention", given, env, measured, notes, out)


def _listed(
    given: Mapping[str, Any], usual: Mapping[str, Any], device: Device, inputs: npz.Inputs | None
) -> tuple[list[Case], list[str]]:
    if inputs is None:
        return cases_of(given, device)
    for name in GIVEN_BY_A_FILE:
        if given[name] != usual[name]:
            option = f"--{name.replace('_', '-')}"
            raise usage_error(
                f"{option} and --inputs contradict each other",
                f"leave out {option}: the file says it",
            )
    found, notes = cases_of({**given, "batch": "1", "context": "1", "model": None}, device)
    layouts = dict.fromkeys(
        (one.layout, one.threads, one.num_splits, one.num_stages) for one in found
    )
    return [
        inputs.case(layout=layout, threads=threads, num_splits=splits, num_stages=stages)
        for layout, threads, splits, stages in layouts
    ], notes


def _check_files(given: Mapping[str, Any], listed: Sequence[Case], output: Path | None) -> None:
    """Refuse what would fail after the work."""
    path: Path | None = given["dump_output"]
    read = [str(given["inputs"])] if given["inputs"] is not None else []
    check_not_read(output, read)
    if path is None:
        return
    check_not_read(path, read)
    if output is not None and path.resolve() == output.resolve():
        raise usage_error(f"-o and --dump-output are both {path}", "give them names of their own")
    if len(listed) > 1:
        raise usage_error(
            f"--dump-output is of one case, and these are {len(listed)}",
            "give one value of each list, such as --batch 1 --context 100",
        )
    if path.suffix.lower() != ".npz":
        raise usage_error(f"--dump-output {path}: it is written as .npz", "name it so: answer.npz")
    check_writable(path)


def measure_cases(
    listed: Sequence[Case],
    device: Device,
    given: Mapping[str, Any],
    budget_s: float,
    inputs: npz.Inputs | None,
    out: Output,
) -> Measured:
    """The rows of every case; the first failure or Ctrl-C ends it, with what there is."""
    names = _providers(given.get("provider"))
    measured = Measured()
    if not device.is_gpu and compiles():
        out.aside("compiling the CPU kernel, once on this machine: about 2 s")
    peaks: dict[tuple[str, int | None], float] = {}
    with out.progress("bench attention", len(listed)) as advance:
        for done, case in enumerate(listed):
            share = max(0.0, budget_s) / (len(listed) - done)
            try:
                full = partial(out_of_memory, case, memory_of(case, pools=1), device)
                with (
                    stdout_for_data(),
                    named_failure(
                        _words(case), full, leave_out="; --provider leaves providers out"
                    ),
                ):
                    found = _one(case, device, names, share, given, inputs, peaks)
            except KeyboardInterrupt:
                measured.failed = interrupted(len(measured.rows), f"{done} of {len(listed)} cases")
                break
            except KvtoolError as error:
                if not measured.rows:
                    raise
                measured.failed = error
                break
            measured.rows += found.rows
            measured.notes += found.notes
            budget_s -= found.sampled_s
            advance(1)
    if not measured.rows and measured.failed is None:
        measured.failed = KvtoolError(
            f"nothing was measured: {', '.join(names)} {'is' if len(names) == 1 else 'are'} not here",
            f"the notes say why; on this {device.kind} there are paged, contiguous, sdpa, gather-sdpa",
            code="no_provider",
        )
    return measured


def _words(case: Case) -> str:
    return f"batch {case.batch}, context {case.context_tokens:,}, block size {case.block_size}"


def _one(
    case: Case,
    device: Device,
    names: Sequence[str],
    budget_s: float,
    given: Mapping[str, Any],
    inputs: npz.Inputs | None,
    peaks: dict[tuple[str, int | None], float],
) -> Found:
    # A CPU's kernels compute in fp32 whatever the cache holds.
    key = (case.kv_dtype if device.is_gpu else "fp32", case.threads)
    if key not in peaks:
        peaks[key] = matmul_roof(device, key[0], threads=case.threads)

    def keep(data: Any, ready: Any) -> None:
        if given.get("dump_output") is not None:
            write_npz(given["dump_output"], npz.outputs(data, ready))

    seed = given["seed"]
    data = make(case, device, seed=seed) if inputs is None else make_from(case, device, inputs)
    return measure_case(data, names=names, budget_s=budget_s, seed=seed, peak=peaks[key], keep=keep)


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """The arrays as a compressed file that is there whole or not at all."""
    import io

    import numpy as np

    text = io.BytesIO()
    np.savez_compressed(text, **arrays)
    write_file(path, text.getvalue())


def _providers(typed: str | None) -> list[str]:
    return list(NAMES) if typed is None else names_in(typed, "--provider", (*NAMES, *ON_REQUEST))
