"""The end of a step in the fast engine: tokens, and requests that have all of them (rule R14)."""

from __future__ import annotations

from kvtool.jit import part
from kvtool.sim.admission import blocks_for, hold_blocks, new_line
from kvtool.sim.lists import joins_decoding, leaves_decoding, remove_running
from kvtool.sim.record import note_token
from kvtool.sim.regions import release
from kvtool.sim.settings import ABORTED, CUT, DONE
from kvtool.sim.state import CALENDAR, NONE, PAGED, Lines, Records, Run


@part
def end(run: Run, lines: Lines, at: int, status: int) -> None:
    """What became of a request is told at the end of the step; then its line is free."""
    lines[at].status = status
    lines[run.ended].ended = at
    run.ended += 1


@part
def finish(run: Run, lines: Lines, at: int) -> None:
    """The request has all its tokens; its line is free."""
    line = lines[at]
    cut = line.limit < line.output
    run.done += 1
    run.cut += cut
    run.tokens -= line.computed
    if run.allocator == PAGED:
        hold_blocks(run, -blocks_for(run, line.computed))
        run.internal -= line.pad
    else:
        release(run, lines, at)
    remove_running(run, lines, at)
    end(run, lines, at, CUT if cut else DONE)


@part
def finish_due(run: Run, lines: Lines) -> None:
    """R14 for those that decode: who has its last token in this step leaves."""
    at = run.calendar[run.step & (CALENDAR - 1)]
    while at >= 0:
        line = lines[at]
        later = line.later
        if line.due == run.step:
            leaves_decoding(run, lines, at)
            line.computed, line.generated = line.final, line.limit
            finish(run, lines, at)
        at = later


@part
def output_of_prefills(run: Run, lines: Lines) -> None:
    """R14 for those that had prompt left: who has computed it all gets a token, and decodes on."""
    kept = 0
    for k in range(run.prefilling):
        at = lines[k].prefilling
        line = lines[at]
        if line.computed < line.prompt + line.generated:
            lines[kept].prefilling = at
            kept += 1
            continue
        line.generated += 1
        note_token(run, lines, at)
        if line.generated >= line.limit:
            finish(run, lines, at)
        else:
            joins_decoding(run, lines, at, run.step + 1)
    run.prefilling = kept


@part
def abort_head(run: Run, lines: Lines, queue: Records) -> None:
    """R18: nothing will change, because the head never fits: it is aborted, or the run ends."""
    if not run.aborts:
        run.stopped = 1
        return
    if run.preempted > 0:
        run.preempted -= 1
        at = lines[run.preempted].preempted
    else:
        at = run.head_line if run.head_line >= 0 else new_line(run, lines, queue[run.head])
        run.head += 1
        run.head_line = NONE
    run.cpu_used -= lines[at].on_cpu
    run.aborted += 1
    end(run, lines, at, ABORTED)
