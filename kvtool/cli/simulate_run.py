"""The run of `kvtool simulate`: its rows, the highest rate that keeps an objective, its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.cli.simulate_rate import NO_RATE, Advance, at_highest, beyond, growth, replayed
from kvtool.cli.simulate_requests import STATIC, Case
from kvtool.cli.simulate_words import Words
from kvtool.errors import INTERRUPTED, KvtoolError
from kvtool.run import Row
from kvtool.sim import instances
from kvtool.sim.disaggregated import DisaggregatedReplay
from kvtool.sim.replay import Replay, compiles
from kvtool.simulate import goals_of, notes_of, row_of
from kvtool.simulate_disaggregated import row_of_disaggregated
from kvtool.timeline import Timeline, timeline_of

if TYPE_CHECKING:
    from kvtool.output import Output
    from kvtool.requests import Requests
    from kvtool.slo import Highest

MOST_LINES = 7
"""Runs that a picture shows."""


@dataclass(slots=True)
class Done:
    """What has come of the cases so far."""

    rows: list[Row] = field(default_factory=list)
    lines: list[Timeline] = field(default_factory=list)
    """What a picture shows."""
    last: Replay | None = None
    failed: KvtoolError | None = None
    told: dict[str, list[int]] = field(default_factory=dict)
    """Notes, with the numbers of the rows that they are on."""


def run_cases(words: Words, out: Output, *, drawn: bool) -> Done:
    """A row for each case until an interrupt or an error; what is made by then is kept."""
    cases, done = words.cases, Done()
    if any(_compiles(case) for case in cases):
        out.aside("compiling the simulator, once on this machine: 5 to 10 s")
    with out.progress("simulating", total=sum(len(case.requests) for case in cases)) as advance:
        try:
            for case in cases:
                if not _run_case(case, words, out, advance, done, drawn=drawn):
                    break
        except KeyboardInterrupt:
            if not done.rows:
                raise
            done.failed = _stopped("run again for the rest: the rows that are told are whole")
    for text, numbers in done.told.items():
        out.note(text + _of_rows(numbers, len(done.rows)))
    if drawn and len(done.rows) > MOST_LINES:
        out.note(f"the picture shows the first {MOST_LINES} of {len(done.rows):,} runs")
    if not done.rows and done.failed is not None:
        raise done.failed
    return done


def _run_case(
    case: Case, words: Words, out: Output, advance: Advance, done: Done, *, drawn: bool
) -> bool:
    """The row of a case; whether the next one may be run. A rate that is not found costs its case alone."""
    name = _name(case, words.cases)
    try:
        case = _at_highest(case, words, out) if words.find_rate else case
        found = replayed(case, advance)
    except MemoryError as end:
        done.failed = KvtoolError(
            f"{name}: there is not enough memory for its {len(case.requests):,} requests and their steps",
            "give fewer --num-requests, or a machine with more memory; rows that are told are whole",
            code="too_large",
        )
        if not done.rows:
            raise done.failed from end
        return False
    except KvtoolError as error:
        if len(words.cases) > 1:
            error.message = f"{name}: {error.message}"
        if error.code == NO_RATE:
            if done.failed is not None:
                out.note(error.message)
            done.failed = done.failed or error
            return True
        if not done.rows:
            raise
        done.failed = error
        return False
    row = _row(case, found, words)
    done.rows.append(row)
    done.last = found
    if not found.interrupted:
        row |= beyond(case, row, words.seed)
    for text in notes_of(row, interrupted=found.interrupted):
        done.told.setdefault(text, []).append(len(done.rows))
    if drawn and len(done.lines) < MOST_LINES:
        done.lines.append(timeline_of(name, found, case.settings))
    return not found.interrupted


def _compiles(case: Case) -> bool:
    """Whether the first such run on this machine is still to come."""
    if case.split is not None:
        return instances.compiles()
    return case.scheduler != STATIC and compiles(case.requests, case.settings)


def _row(case: Case, found: Replay, words: Words) -> Row:
    if case.split is not None and isinstance(found, DisaggregatedReplay):
        row = row_of_disaggregated(found, case.requests, case.split)
    else:
        row = row_of(
            found, case.requests, case.settings, case.bytes_per_token, scheduler=case.scheduler
        )
    row |= goals_of(found, words.slo, row, case.priced_usd) | growth(found)
    return {
        "trace": case.name if case.is_file else None,
        "workload": None if case.is_file else case.name,
        "rate": case.rate,
        "model": case.model,
        "gpu": case.gpu,
        "num_gpus": case.num_gpus,
        **row,
        "scheduler": case.scheduler,
        "step_time_basis": case.step_time_basis,
        "made": dict(case.made) or None,
        **_highest(case.highest),
    }


def _highest(found: Highest | None) -> Row:
    """What --find-rate found: the highest rate that keeps the objective, the lowest tried that does not."""
    return {
        "found_rate": found and found.rate,
        "found_rate_met_share": found and found.share,
        "refused_rate": found and found.refused_rate,
        "refused_rate_met_share": found and found.refused_share,
        "refused_rate_queue_grows": found and found.refused_grows,
    }


def _at_highest(case: Case, words: Words, out: Output) -> Case:
    """The case at the highest rate that keeps the objective."""
    assert words.slo is not None, "checked: a rate is found for an objective"
    name = _name(case, words.cases)
    try:
        case, notes = at_highest(case, words.slo, words.seed)
    except KeyboardInterrupt as end:
        raise _stopped(
            "run again: rows that are told are whole", f" while the rate of {name} was looked for"
        ) from end
    for text in notes:
        out.note(f"{name}: {text}")
    return case


def _name(case: Case, cases: Sequence[Case]) -> str:
    """What tells a run of a picture from the others."""
    words = [case.scheduler]
    if len({one.rate for one in cases}) > 1:
        words.append(f"rate {case.rate}")
    if len({one.name for one in cases}) > 1:
        words.append(case.name)
    if len({one.split and one.split.bits_per_s for one in cases}) > 1 and case.split is not None:
        words.append(f"link {case.split.bits_per_s / 1e9:,g} Gb/s")
    for name in ("preemption", "index", "policy"):
        if len({getattr(one.settings, name) for one in cases}) > 1:
            words.append(getattr(case.settings, name))
    sizes = ["cpu_blocks", "num_blocks", "block_size", "max_num_seqs", "max_batched_tokens"]
    pools = {(one.scheduler, one.settings.num_blocks) for one in cases}
    if len(pools) == len({one.scheduler for one in cases}):  # static needs no null block
        sizes.remove("num_blocks")
    for name in sizes:
        if len({getattr(one.settings, name) for one in cases}) > 1:
            words.append(f"{name.replace('_', ' ')} {getattr(case.settings, name):,}")
    return ", ".join(words)


def _of_rows(numbers: list[int], count: int) -> str:
    """Which rows a note is of, if not of all."""
    if len(numbers) == count:
        return ""
    more = f" and {len(numbers) - 3:,} more" if len(numbers) > 3 else ""
    return f" (row {', '.join(map(str, numbers[:3]))}{more})"


def interrupted(rows: list[Row], asked: int, out: Output) -> KvtoolError:
    """What was done before the interrupt is told; the files would be taken for whole ones."""
    last = rows[-1]
    ended, of = last["requests"] - last["unfinished"], f"{last['requests']:,} requests"
    if asked > 1:
        of += f" of row {len(rows):,} of {asked:,}"
    out.note(f"interrupted after {ended:,} of {of}: its row is of what was done so far")
    return _stopped("run again for the rest; --per-request and --per-step wrote nothing")


def _stopped(hint: str, when: str = "") -> KvtoolError:
    return KvtoolError(f"interrupted{when}", hint, code="interrupted", exit_code=INTERRUPTED)


def write_files(
    given: Mapping[str, Any], found: Replay, requests: Requests, out: Output
) -> KvtoolError | None:
    """What became of requests and steps, as files; the first failure does not lose the row."""
    from kvtool.cli.simulate_files import request_lines, step_lines
    from kvtool.output import write_file

    files = (("per_request", request_lines(found, requests)), ("per_step", step_lines(found)))
    try:
        for name, lines in files:
            if given[name] is not None:
                write_file(given[name], lines)
                out.aside(f"written to {given[name]}")
    except KvtoolError as error:
        return error
    except KeyboardInterrupt:
        return KvtoolError(
            "interrupted while --per-request and --per-step were written",
            "the row is whole; a file that is there is whole too, run again for the other",
            code="interrupted",
            exit_code=INTERRUPTED,
        )
    return None
