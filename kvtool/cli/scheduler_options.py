"""The options of vLLM's scheduler, for each command that runs it, and their product as settings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sized
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtool.cli.options import names_in
from kvtool.errors import KvtoolError, did_you_mean, usage_error
from kvtool.units import MAX_COUNT, MAX_LIST, parse_counts

if TYPE_CHECKING:
    from kvtool.sim.settings import StepTime

SCHEDULER = "Scheduler"
MAX_BLOCK_SIZE = 2**16
MAX_BLOCKS = 2**31
MAX_SEQS = 2**16
MAX_SLOTS = 2**40
"""Tokens of a pool: what sums over its steps have room for."""
MAX_STEP_NS = 10**12
MOST_ROWS = 10_000
ON_STALL = ("abort-head", "stop")
POLICIES = ("fcfs", "priority", "lpm")
INDEXES = ("hash", "radix")
FINISH_BY = ("max-tokens", "eos")
STEP_TIME = "base_ns=10000000,token_ns=20000,context_ns=1"
OTHER_TERMS = "attention_ns, request_ns, read_ns and swap_ns are its other terms"


def _numbers(flag: str, help: str, *, metavar: str = "TOKENS") -> Any:
    """An option that takes a list; its default is the command's."""
    return typer.Option(flag, metavar=metavar, rich_help_panel=SCHEDULER, help=help)


def _flag(flags: str, help: str) -> Any:
    return typer.Option(flags, rich_help_panel=SCHEDULER, help=help)


NumBlocksOpt = Annotated[
    str, _numbers("--num-blocks", "Blocks of the pool, without vLLM's null block.", metavar="N")
]
BlockSizeOpt = Annotated[str | None, _numbers("--block-size", "Tokens of a block.")]
MaxModelLenOpt = Annotated[
    str | None, _numbers("--max-model-len", "The longest request: prompt and output.")
]
MaxNumSeqsOpt = Annotated[
    str | None, _numbers("--max-num-seqs", "Requests that may run at once.", metavar="N")
]
MaxActiveOpt = Annotated[
    str | None,
    _numbers(
        "--max-num-active-seqs", "Admit only while fewer run. Default: --max-num-seqs.",
        metavar="N",
    ),
]  # fmt: skip
MaxBatchedOpt = Annotated[
    str | None, _numbers("--max-batched-tokens", "Tokens of a step (max_num_batched_tokens).")
]
MaxScheduledOpt = Annotated[
    str | None,
    _numbers(
        "--max-scheduled-tokens", "Tokens that a step may schedule. Default: --max-batched-tokens.",
    ),
]  # fmt: skip
ChunkedOpt = Annotated[
    bool,
    _flag(
        "--chunked-prefill/--no-chunked-prefill", "Cut a prompt that does not fit a step's tokens."
    ),
]
WatermarkOpt = Annotated[
    str | None,
    _numbers(
        "--watermark", "Share of the pool that an admission leaves free, from 0 to below 1.",
        metavar="SHARE",
    ),
]  # fmt: skip
FullPromptOpt = Annotated[
    bool,
    _flag(
        "--reserve-full-prompt/--no-reserve-full-prompt",
        "Admit a request only if its whole prompt would fit (scheduler_reserve_full_isl).",
    ),
]
LongPrefillOpt = Annotated[
    str | None,
    _numbers(
        "--long-prefill-threshold", "The most tokens of one prompt in a step with others; 0: no such limit."
    ),
]  # fmt: skip
LongAdaptiveOpt = Annotated[
    bool,
    _flag(
        "--long-prefill-adaptive", "Raise that to an even share of the step's tokens, if larger."
    ),
]
PrefixCachingOpt = Annotated[
    bool,
    _flag(
        "--prefix-caching/--no-prefix-caching",
        "Share blocks of equal prefixes: the requests need segments, or hash_ids.",
    ),
]
IndexOpt = Annotated[
    str,
    typer.Option(
        "--index", metavar="NAMES", rich_help_panel=SCHEDULER,
        help="Of --prefix-caching: hash (vLLM), or radix: SGLang's tree under vLLM's steps, by its source, not "
        "compared with an engine; both as a list.",
    ),
]  # fmt: skip
PolicyOpt = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAMES", rich_help_panel=SCHEDULER,
        help="fcfs: first come, first served. priority: the lowest `priority` of a line of the trace first (JSON "
        "lines have one). lpm: SGLang's longest cached prefix first while at most 128 wait, by its source, not "
        "compared with an engine. Or a list.",
    ),
]  # fmt: skip
AsyncOpt = Annotated[
    bool,
    _flag(
        "--async-scheduling/--no-async-scheduling",
        "Schedule a step before the last one's output is there: two are under way.",
    ),
]
FinishByOpt = Annotated[
    str,
    typer.Option(
        "--finish-by", metavar="WAY", rich_help_panel=SCHEDULER,
        help="max-tokens, or eos, which is not foreseen: another schedule if it is asynchronous.",
    ),
]  # fmt: skip
OnStallOpt = Annotated[
    str,
    typer.Option(
        "--on-stall", metavar="WAY", rich_help_panel=SCHEDULER,
        help="When the head of the queue can never run: abort-head, or stop the run.",
    ),
]  # fmt: skip
StepTimeOpt = Annotated[
    str | None,
    typer.Option(
        "--step-time", metavar="LAW", rich_help_panel=SCHEDULER,
        help="ns of a step: base_ns + token_ns × its tokens + context_ns × tokens of context + attention_ns × "
        "pairs of a token and one that it attends to + request_ns × its requests; with read_ns, the longer of "
        "reading (read, context) and computing (token, attention, request); swap_ns a block that moves.",
    ),
]  # fmt: skip

_COUNTS: dict[str, tuple[int, int]] = {
    "block_size": (1, MAX_BLOCK_SIZE),
    "max_model_len": (1, MAX_COUNT),
    "max_num_seqs": (1, MAX_SEQS),
    "max_num_active_seqs": (1, MAX_SEQS),
    "max_batched_tokens": (1, MAX_COUNT),
    "max_scheduled_tokens": (1, MAX_COUNT),
    "long_prefill_threshold": (0, MAX_COUNT),
}
"""Options that take lists of whole numbers, with their bounds."""


def scheduler_grid(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Arguments of Settings, all but num_blocks, for each combination of the options' lists.

    `given` has the options as typed, by the names of Settings; one that is absent or None is left
    to Settings. The last list turns fastest.
    """
    asked = {name: given[name] for name in given if given[name] is not None}
    lists: dict[str, list[Any]] = {
        name: parse_counts(asked[name], name=flag_of(name), low=low, high=high)
        for name, (low, high) in _COUNTS.items()
        if name in asked
    }
    if "watermark" in asked:
        lists["watermark"] = _watermarks(asked["watermark"])
    for name, known in (("index", INDEXES), ("policy", POLICIES)):
        if name in asked:
            lists[name] = list(names_in(asked[name], flag_of(name), known))
    check_rows(lists.values())
    fixed: dict[str, Any] = {
        name: asked[name]
        for name in (
            "chunked_prefill", "reserve_full_prompt", "long_prefill_adaptive", "prefix_caching",
            "async_scheduling",
        )
        if name in asked
    }  # fmt: skip
    for name, known in (("on_stall", ON_STALL), ("finish_by", FINISH_BY)):
        if name in asked:
            fixed[name] = one_of(asked[name], known, flag_of(name))
    if "step_time" in asked:
        fixed["step_time"] = _step_time(asked["step_time"])
    return [fixed | dict(zip(lists, values, strict=True)) for values in product(*lists.values())]


def check_rows(lists: Iterable[Sized], most: int = MOST_ROWS) -> None:
    """Refuse a product of lists that would run for hours."""
    rows = math.prod(map(len, lists))
    if rows > most:
        raise usage_error(
            f"{rows:,} rows are too many for one run",
            f"ask for at most {most:,}: shorter lists, or several runs",
        )


def check_modelled(given: Mapping[str, Any]) -> None:
    """Refuse a combination that was never compared with vLLM, or that means nothing."""
    indexes = names_in(given["index"], "--index", INDEXES)
    policies = names_in(given["policy"], "--policy", POLICIES)
    of_cache = [("--index radix", "radix" in indexes), ("--policy lpm", "lpm" in policies)]
    for flag, is_asked in of_cache:
        if is_asked and not given["prefix_caching"]:
            raise usage_error(f"{flag} is of a prefix cache", f"add --prefix-caching to {flag}")
    if not given["async_scheduling"]:
        return
    why = "what vLLM does was not measured"
    for flag, is_asked in (("--policy priority", "priority" in policies), *of_cache):
        if is_asked:
            raise KvtoolError(
                f"{flag} with --async-scheduling: {why}",
                "leave out one of them",
                code="unsupported",
            )
        why = "SGLang's rules are modelled one step at a time"


def flag_of(name: str) -> str:
    """The option behind a parameter: `block_size` is `--block-size`."""
    return "--" + name.replace("_", "-")


def one_of(text: str, known: tuple[str, ...], flag: str) -> str:
    """A word of several."""
    if text not in known:
        raise usage_error(
            f"{flag}: '{text[:40]}' is not known",
            f"it takes {' or '.join(known)}.{did_you_mean(text[:40], known)}",
        )
    return text


def _watermarks(text: str) -> list[float]:
    values = []
    for part in text.split(","):
        number = re.fullmatch(r"[0-9]{0,3}\.?[0-9]{1,18}(e-[0-9]{1,3})?", part.strip(), re.I)
        if number is None or not 0 <= float(part) < 1:
            raise usage_error(
                f"--watermark: '{part[:40]}' is not a share of the pool",
                "give a number from 0 to below 1, or a list: --watermark 0,0.01",
            )
        values.append(float(part))
    if len(values) > MAX_LIST:
        raise usage_error(f"--watermark: more than {MAX_LIST:,} values", "give a shorter list")
    return values


def _step_time(law: str | StepTime) -> StepTime:
    """As typed, the other terms by default; or one that follows from a model and a GPU."""
    from kvtool.sim.settings import StepTime

    return StepTime(**step_time_terms(law)) if isinstance(law, str) else law


def step_time_terms(text: str) -> dict[str, Any]:
    """'base_ns=…,token_ns=…,context_ns=…': the terms that are typed."""
    from kvtool.sim.settings import StepTime

    names = tuple(StepTime.__dataclass_fields__)
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in names or name in values:
            twice = name in values
            near = "" if twice else did_you_mean(name[:40], names)
            raise usage_error(
                f"--step-time: '{name[:40]}' is {'given twice' if twice else 'not known'}",
                f"write {STEP_TIME}, or some of it; {OTHER_TERMS}.{near}",
            )
        whole = name in ("base_ns", "read_ns", "swap_ns")
        form = "[0-9]{1,13}" if whole else r"[0-9]{1,13}(\.[0-9]{1,6})?"
        if not re.fullmatch(form, number) or float(number) > MAX_STEP_NS:
            kind = "whole ns" if whole else "ns with six digits behind the point at most,"
            raise usage_error(
                f"--step-time: {name} takes {kind} from 0 to {MAX_STEP_NS:,}, not '{number[:40]}'",
                f"write {STEP_TIME}, or some of it",
            )
        values[name] = float(number) if "." in number else int(number)
    return values
