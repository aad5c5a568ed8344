"""Made workloads with shared prefixes, written plainly: sessions as lists of tokens, one by one."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from numpy.random import SeedSequence

from kvtool.lengths import Lengths, parse_lengths, sampler
from kvtool.sharing import Sharing
from kvtool.sharing_part import Part
from kvtool.trace_blocks import HashedRequests

Token = tuple[int, int]


class Request(NamedTuple):
    tenant: int
    prompt: list[Token]
    output: list[Token]


def served(sharing: Sharing) -> Iterator[Request]:
    """The requests; a token is the part and a number given once."""
    seeds = SeedSequence(sharing.seed).spawn(1 + len(sharing.parts))
    chooser = np.random.default_rng(seeds[0])
    streams = [
        part_served(place, part, seed)
        for place, (part, seed) in enumerate(zip(sharing.parts, seeds[1:], strict=True))
    ]
    below = list(itertools.accumulate(part.weight for part in sharing.parts))
    for _ in range(sharing.num_requests):
        yield next(streams[bisect_right(below, chooser.random() * below[-1])])


def part_served(place: int, part: Part, seed: SeedSequence) -> Iterator[Request]:
    """One part's: a random slot's session goes next, and is replaced once it is done."""
    names = ("slot", "prefix", "pick", "share", "session", "turn", "output")
    rngs = dict(zip(names, map(np.random.default_rng, seed.spawn(len(names))), strict=True))
    numbers = itertools.count()

    def fresh(name: str, lengths: Lengths | None) -> list[Token]:
        length = 0 if lengths is None else int(sampler(lengths)(rngs[name], 1)[0])
        return [(place, next(numbers)) for _ in range(length)]

    prefixes = [fresh("prefix", part.prefix) for _ in range(part.num_prefixes)]
    below = list(itertools.accumulate(k**-part.zipf for k in range(1, part.num_prefixes + 1)))

    def session() -> Iterator[Request]:
        path: list[Token] = []
        if prefixes:
            path = prefixes[bisect_right(below, rngs["pick"].random() * below[-1])]
            if rngs["share"].random() >= part.share:
                path = [(place, next(numbers)) for _ in path]
        nodes = [path + fresh("session", part.session)]
        made = []
        for _ in range(part.turns):
            children = []
            for node in nodes:
                for _ in range(part.branch):
                    prompt = node + fresh("turn", part.turn)
                    made.append(Request(place, prompt, fresh("output", part.output)))
                    children.append(prompt + made[-1].output)
            kept = min(part.keep or len(children), len(children))
            nodes = [children[index * len(children) // kept] for index in range(kept)]
        return iter(made)

    live: list[Iterator[Request]] = [iter(()) for _ in range(part.concurrency)]
    while True:
        slot = int(rngs["slot"].random() * part.concurrency)
        request = next(live[slot], None)
        if request is None:
            live[slot] = session()
            request = next(live[slot])
        yield request


def unspelled(requests: HashedRequests) -> list[tuple[list[int], list[int]]]:
    """Prompt and output of each request, as lists."""
    cut = [part.tolist() for part in np.split(requests.hash_ids, requests.starts[1:-1])]
    lengths = requests.prompt_tokens.tolist()
    return [(one[:length], one[length:]) for one, length in zip(cut, lengths, strict=True)]


LENGTHS = [
    parse_lengths(spec, name="--turn-tokens", mean=mean, cap=20)
    for spec, mean in (
        ("fixed:1", None), ("fixed:3", None), ("uniform:low=1,high=9", None), ("geometric", 4)
    )
]  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Workloads of every shape, small."""
    lengths = st.sampled_from(LENGTHS)
    num_prefixes = draw(st.integers(0, 4))
    return Part(
        preset="made",
        tenant="made",
        weight=draw(st.sampled_from([0.5, 1.0, 3.0])),
        num_prefixes=num_prefixes,
        prefix=draw(lengths) if num_prefixes else None,
        zipf=draw(st.sampled_from([0.0, 1.0, 2.5])),
        share=draw(st.sampled_from([0.0, 0.5, 1.0])),
        session=draw(st.none() | lengths),
        turn=draw(lengths),
        output=draw(lengths),
        turns=draw(st.integers(1, 4)),
        branch=draw(st.integers(1, 3)),
        keep=draw(st.none() | st.integers(1, 4)),
        concurrency=draw(st.integers(1, 5)),
    )


sharings = st.builds(
    Sharing,
    name=st.just("made"),
    num_requests=st.integers(1, 80),
    seed=st.integers(0, 1000),
    parts=st.lists(parts(), min_size=1, max_size=3).map(tuple),
)
