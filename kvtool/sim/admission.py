"""Admission in the fast engine: the head of the queue, and room for its first tokens."""

from __future__ import annotations

from typing import Any

from kvtool.jit import part
from kvtool.sim.clock import beyond
from kvtool.sim.lists import append_running
from kvtool.sim.memory import SMALLEST_REGION
from kvtool.sim.regions import place, power_of_two
from kvtool.sim.settings import NO_MEMORY, NO_SEAT, NO_TOKENS, NOBODY_WAITS
from kvtool.sim.state import MAX, NONE, ORACLE, PAGED, POW2, Lines, Records, Run


@part
def blocks_for(run: Run, tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return (tokens + run.block_size - 1) // run.block_size


@part
def threshold(run: Run, tokens: int) -> int:
    """R3: a long prefill is cut unless its request is the only one."""
    if run.threshold <= 0 or run.crowd <= 1:
        return tokens
    if run.adaptive:
        return min(tokens, max(run.threshold, run.max_batched_tokens // run.crowd))
    return min(tokens, run.threshold)


@part
def hold_blocks(run: Run, count: int) -> None:
    """So many blocks more are in use, or fewer."""
    run.free_blocks -= count
    run.held += count * run.block_size


@part
def set_pad(run: Run, lines: Lines, at: int, tokens: int) -> None:
    """The slots of so many tokens' blocks that are beyond the last token of the request."""
    line = lines[at]
    pad = max(0, blocks_for(run, tokens) * run.block_size - line.final)
    run.internal += pad - line.pad
    line.pad = pad


@part
def admit(run: Run, lines: Lines, queue: Records) -> int:
    """R7 to R9: from the head of the queue until something fails. What failed."""
    while run.preempted > 0 or run.head < run.arrived:
        if run.running >= run.max_running:
            return NO_SEAT
        if run.now_tokens >= run.token_budget:
            return NO_TOKENS
        resumed = run.preempted > 0
        if resumed:
            at = lines[run.preempted - 1].preempted
        elif run.head_line >= 0:
            at = run.head_line
        elif run.free_lines == 0:
            return NO_MEMORY  # as many run as the pool has slots
        else:
            at = new_line(run, lines, queue[run.head])
        line = lines[at]
        tokens = threshold(run, line.prompt + line.generated - line.computed)
        budget = run.token_budget - run.now_tokens
        if not run.chunked_prefill and tokens > budget:
            return NO_TOKENS
        tokens = min(tokens, budget)
        if not take_memory(run, lines, at, line.computed + tokens):
            return NO_MEMORY
        if resumed:
            run.preempted -= 1
        else:
            run.head += 1
            run.head_line = NONE
        run.cpu_used -= line.on_cpu
        run.swapped += line.on_cpu
        line.on_cpu = 0
        run.tokens += line.computed  # what was swapped in, or came with it
        line.computed += tokens
        run.now_tokens += tokens
        run.now_beyond += beyond(tokens, line.computed)
        run.now_batch += 1
        append_running(run, lines, at)
        lines[run.prefilling].prefilling = at
        run.prefilling += 1
        if run.allocator == PAGED:
            set_pad(run, lines, at, line.computed)
        if line.admit_step < 0:
            line.admit_step = run.step
    return NOBODY_WAITS


@part
def new_line(run: Run, lines: Lines, request: Any) -> int:
    """A line for the head of the queue, which keeps it until it is admitted."""
    run.free_lines -= 1
    at = run.head_line = lines[run.free_lines].free
    line = lines[at]
    line.index, line.prompt, line.output = request.index, request.prompt, request.output
    line.limit = min(line.output, run.max_model_len - line.prompt)
    line.final = line.prompt + line.limit - 1
    line.generated = request.prefilled
    line.computed = line.prompt * line.generated
    line.needed = blocks_for(run, line.prompt + line.generated)
    line.since = line.skipped = line.last_ns = line.address = NONE
    line.admit_step = line.first_token_step = line.first_token_ns = NONE
    line.chunk = line.pad = line.room = line.on_cpu = 0
    line.num_preemptions = 0
    return at


@part
def take_memory(run: Run, lines: Lines, at: int, tokens: int) -> bool:
    """Room for the first tokens of a request, if the allocator lets it in."""
    line = lines[at]
    total = line.prompt + line.generated
    if run.allocator != PAGED:
        return place(run, lines, at, reservation(run, lines, at, total))
    needed = line.needed if run.full_check else blocks_for(run, tokens)
    if needed + (run.watermark_blocks if run.running else 0) > run.free_blocks:
        return False
    hold_blocks(run, blocks_for(run, tokens))
    return True


@part
def reservation(run: Run, lines: Lines, at: int, total: int) -> int:
    """Slots that a contiguous allocator asks for: kvtool.sim.memory.reservation."""
    line = lines[at]
    if run.allocator == MAX:
        return run.max_model_len
    if run.allocator == POW2:
        return min(line.prompt + power_of_two(line.output), run.max_model_len)
    if run.allocator == ORACLE:
        return line.final
    return min(max(SMALLEST_REGION, power_of_two(total + 1)), run.max_model_len)
