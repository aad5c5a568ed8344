"""The run of `kvtool bench all`: the defaults of both commands, with what was typed put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kvtool.bench.device import describe, find_device
from kvtool.cli.bench_attention import attention
from kvtool.cli.bench_attention_run import measure_cases
from kvtool.cli.bench_cases import cases_of, threads_of
from kvtool.cli.bench_decode import decode
from kvtool.cli.bench_decode_run import measure_decode
from kvtool.cli.bench_emit import emit, interrupted, params_in_errors
from kvtool.cli.options import defaults_of
from kvtool.errors import KvtoolError, usage_error
from kvtool.output import Output
from kvtool.units import parse_seconds

_Value = TypeVar("_Value")


def run_all(given: Mapping[str, Any], out: Output) -> None:
    """The attention cases, then decode unless they failed; the rows of both in one run."""
    with params_in_errors(given):
        device = find_device(given["device"])
        kernels = defaults_of(attention) | dict(given)
        threads = _one(threads_of(given["threads"], device), "--threads")
        _one(given["kv_dtype"].split(","), "--kv-dtype")
        env = describe(device, threads=threads)
        models = (
            defaults_of(decode) | dict(given) | {"dtype": given["kv_dtype"], "threads": threads}
        )
        listed, notes = cases_of(kernels, device)
        budget_s = parse_seconds(given["budget"], name="--budget")
        measured = measure_cases(listed, device, kernels, budget_s, None, out)
        if measured.failed is None:
            try:
                more, said = measure_decode(models, device, out)
            except KeyboardInterrupt:
                measured.failed = interrupted(len(measured.rows), "the attention kernel")
            except KvtoolError as error:
                measured.failed = error
            else:
                measured.rows += more.rows
                measured.failed = more.failed
                notes += said
    emit("bench", given, env, measured, notes, out)


def _one(values: Sequence[_Value], option: str) -> _Value:
    """The value of an option that both benchmarks take, each in a list of its own."""
    if len(values) > 1:
        raise usage_error(
            f"{option} takes one value here, not {len(values)}",
            f"kvtool bench attention takes a list of {option}",
        )
    return values[0]
