"""The run of `kvtool simulate`: its rows, the highest rate that keeps an objective, its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvtool.cli.simulate_requests import STATIC, Case, at_rate
from kvtool.cli.simulate_words import Words
from kvtool.errors import INTERRUPTED, KvtoolError
from kvtool.run import Row
from kvtool.sim.disaggregated import PooledReplay, replay_pools
from kvtool.sim.replay import Replay, compiles, replay
from kvtool.simulate import Timeline, goals_of, growth_of, notes_of, row_of, timeline_of
from kvtool.simulate_pools import growth_of_pools, row_of_pools
from kvtool.slo import highest_rate, met

if TYPE_CHECKING:
    from kvtool.output import Output
    from kvtool.slo import Slo

NO_RATE = "no_rate"
MOST_LINES = 7
"""Runs that a picture shows."""
Advance = Callable[[float], None]


def run_cases(
    words: Words, out: Output, *, drawn: bool
) -> tuple[list[Row], list[Timeline], Replay, KvtoolError | None]:
    """A row for each case until an interrupt or an error; what a picture shows; the last replay."""
    cases = words.cases
    if any(case.scheduler != STATIC and compiles(case.requests, case.settings) for case in cases):
        out.aside("compiling the simulator, once on this machine: about 5 s")
    rows: list[Row] = []
    lines: list[Timeline] = []
    told: dict[str, list[int]] = {}
    failed: KvtoolError | None = None
    with out.progress("simulating", total=sum(len(case.requests) for case in cases)) as advance:
        for case in cases:
            try:
                case = _at_highest(case, words, advance, out) if words.find_rate else case
                found = _replay(case, advance)
            except KvtoolError as error:
                if error.code == NO_RATE and case is not cases[-1]:
                    out.note(f"{_name(case, cases)}: {error.message}")
                    continue
                if not rows:
                    raise
                failed = error
                break
            row = _row(case, found, words.slo)
            rows.append(row)
            for text in notes_of(row, interrupted=found.interrupted):
                told.setdefault(text, []).append(len(rows))
            if drawn and len(lines) < MOST_LINES:
                lines.append(timeline_of(_name(case, cases), found, case.settings))
            if found.interrupted:
                break
    for text, numbers in told.items():
        out.note(text + _of_rows(numbers, len(rows)))
    if drawn and len(rows) > MOST_LINES:
        out.note(f"the picture shows the first {MOST_LINES} of {len(rows):,} runs")
    return rows, lines, found, failed


def _replay(case: Case, advance: Advance) -> Replay:
    if case.pools is not None:
        return replay_pools(case.requests, case.pools, advance)
    if case.scheduler == STATIC:
        from kvtool.sim.static_replay import replay_static

        return replay_static(case.requests, case.settings, advance)
    return replay(case.requests, case.settings, advance, contents=case.contents)


def _row(case: Case, found: Replay, slo: Slo | None) -> Row:
    if case.pools is not None and isinstance(found, PooledReplay):
        row = row_of_pools(found, case.requests, case.pools)
    else:
        row = row_of(found, case.requests, case.settings, case.bytes_per_token)
    row |= goals_of(found, slo, row, case.priced_usd) | _growth(found)
    return {
        "trace": case.name if case.is_file else None,
        "workload": None if case.is_file else case.name,
        "rate": case.rate,
        "model": case.model,
        "gpu": case.gpu,
        "num_gpus": case.num_gpus,
        **row,
        "scheduler": case.scheduler,
        "made": dict(case.made) or None,
    }


def _growth(found: Replay) -> Row:
    return growth_of_pools(found) if isinstance(found, PooledReplay) else growth_of(found)


def _at_highest(case: Case, words: Words, advance: Advance, out: Output) -> Case:
    """The case at the highest rate that keeps the objective."""
    assert words.slo is not None, "checked: a rate is found for an objective"
    slo = words.slo
    saturated = replace(case, requests=at_rate(case.requests, None, words.seed))
    first = _row(saturated, _replay(saturated, lambda done: None), None)
    rate = first["requests_per_s"]
    if not rate:
        raise KvtoolError(
            f"{case.name}: none of its requests is served, at any rate",
            "make the pool larger, or --max-model-len",
            code=NO_RATE,
        )

    def keeps(rate: float) -> bool:
        tried = replace(case, requests=at_rate(case.requests, rate, words.seed))
        found = _replay(tried, lambda done: None)
        return bool(met(slo, found).mean() >= slo.share) and not _growth(found)["queue_grows"]

    found = highest_rate(keeps, rate)
    if found is None:
        raise KvtoolError(
            f"{case.name}: no rate keeps the objective for {slo.share:.0%} of requests, not even "
            f"{rate / 1000:.3g} a second, at which hardly two run together",
            "a lone request misses it: loosen --slo, take a faster GPU, or another --scheduler",
            code=NO_RATE,
        )
    advance(0)
    out.note(
        f"{_name(case, words.cases)}: the rate is that of a run of {len(case.requests):,} requests; a longer one "
        "may keep less"
    )
    short = f"{found:.4g}"
    told = short if keeps(float(short)) else repr(found)
    return replace(case, rate=told, requests=at_rate(case.requests, float(told), words.seed))


def _name(case: Case, cases: Sequence[Case]) -> str:
    """What tells a run of a picture from the others."""
    words = [case.scheduler]
    if len({one.rate for one in cases}) > 1:
        words.append(f"rate {case.rate}")
    if len({one.name for one in cases}) > 1:
        words.append(case.name)
    if len({one.settings.preemption for one in cases}) > 1:
        words.append(case.settings.preemption)
    for name in ("cpu_blocks", "num_blocks", "block_size", "max_num_seqs", "max_batched_tokens"):
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
    return KvtoolError(
        "interrupted",
        "run again for the rest; --per-request and --per-step wrote nothing",
        code="interrupted",
        exit_code=INTERRUPTED,
    )


def write_files(given: Mapping[str, Any], found: Replay, out: Output) -> KvtoolError | None:
    """What became of requests and steps, as files; the first failure does not lose the row."""
    from kvtool.cli.simulate_files import request_lines, step_lines
    from kvtool.output import write_file

    files = (("per_request", request_lines), ("per_step", step_lines))
    try:
        for name, lines in files:
            if given[name] is not None:
                write_file(given[name], lines(found))
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
