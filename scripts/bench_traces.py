"""Made traces in Mooncake's format for scripts/bench_prefix.py: conversations that grow, interleave and end.

`python scripts/bench_traces.py 12000 > trace.jsonl` writes one. It has the shape of Mooncake's trace of
conversations (kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl), whose figures the
numbers below were chosen after; its content is made up. One seed gives one endless trace: a shorter one is
its beginning. How many conversations go on at once does not grow with its length.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

SEED = 0
BLOCK = 512
STARTS_A_SECOND = 2.15
GOES_ON = 0.37
"""How likely another turn follows."""
LONGEST = 125_000
"""Tokens of a prompt: a conversation ends before."""
# Median and spread of what is lognormal.
FIRST_TOKENS = (5_800, 1.1)
MORE_TOKENS = (700, 1.6)
OUTPUT_TOKENS = (260, 0.75)
PAUSE_MS = (140_000, 0.8)


@dataclass(slots=True)
class Conversation:
    """What the next prompt begins with, and the names of its full blocks, as JSON."""

    tokens: int
    names: list[str] = field(default_factory=lambda: ["0"])  # a block of instructions, all share it


def lines(seed: int = SEED) -> Iterator[str]:
    """The trace, a request at a time, without end."""
    draw = random.Random(seed)
    unused, order = count(1), count()
    waiting: list[tuple[int, int, Conversation | None]] = [(0, next(order), None)]
    while True:
        at_ms, _, conversation = heapq.heappop(waiting)
        if conversation is None:
            after = at_ms + round(draw.expovariate(STARTS_A_SECOND / 1000))
            heapq.heappush(waiting, (after, next(order), None))
            conversation = Conversation(tokens=BLOCK + drawn(draw, FIRST_TOKENS))
        else:
            conversation.tokens += drawn(draw, MORE_TOKENS)
        if conversation.tokens > LONGEST:
            continue
        output = drawn(draw, OUTPUT_TOKENS)
        yield line(at_ms, conversation, output, unused)
        conversation.tokens += output
        if draw.random() < GOES_ON:
            after = at_ms + drawn(draw, PAUSE_MS)
            heapq.heappush(waiting, (after, next(order), conversation))


def drawn(draw: random.Random, shape: tuple[int, float]) -> int:
    """A whole number from 1 on."""
    median, spread = shape
    return 1 + int(median * draw.lognormvariate(0, spread))


def line(at_ms: int, conversation: Conversation, output: int, unused: Iterator[int]) -> str:
    """One request. A last block that is not full has a name that never comes again."""
    full, rest = divmod(conversation.tokens, BLOCK)
    names = conversation.names
    names.extend(str(one) for one in islice(unused, full - len(names)))
    tail = [str(next(unused))] if rest else []
    return (
        f'{{"timestamp": {at_ms}, "input_length": {conversation.tokens}, '
        f'"output_length": {output}, "hash_ids": [{", ".join(names + tail)}]}}\n'
    )


def write_requests(path: Path, requests: int) -> None:
    """A trace of so many requests."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(islice(lines(), requests))


def write_bytes(path: Path, size: int) -> None:
    """A trace of at least so many bytes: whole lines."""
    with path.open("w", encoding="utf-8") as file:
        for text in lines():
            size -= file.write(text)
            if size <= 0:
                return


if __name__ == "__main__":
    sys.stdout.writelines(islice(lines(), int(sys.argv[1])))
