"""Made workloads with shared prefixes: against the plain twin, what is shared, presets, errors."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharing_plain import served, sharings, unspelled

from kvtool import catalog
from kvtool.errors import FAILED, USAGE, KvtoolError
from kvtool.lengths import Lengths, parse_lengths
from kvtool.sharing import MOST_TOKENS, Sharing, chunks, sharing_of, tenants
from kvtool.sim.prefix.replay import Cache, replay
from kvtool.trace_blocks import HashedRequests

NAMES = catalog.preset_ids("prefixes")


def fixed(tokens: int) -> Lengths:
    return parse_lengths(f"fixed:{tokens}", name="--turn-tokens", mean=None, cap=tokens)


def made(sharing: Sharing, **sizes: int) -> HashedRequests:
    """All requests in one."""
    every = list(chunks(sharing, **sizes))
    return HashedRequests(
        arrival_ns=np.concatenate([part.arrival_ns for part in every]),
        prompt_tokens=np.concatenate([part.prompt_tokens for part in every]),
        output_tokens=np.concatenate([part.output_tokens for part in every]),
        hash_ids=np.concatenate([part.hash_ids for part in every]),
        starts=np.cumsum([0, *np.concatenate([np.diff(part.starts) for part in every])]),
        block_size=every[0].block_size,
        tenant=None
        if every[0].tenant is None
        else np.concatenate([part.tenant for part in every if part.tenant is not None]),
        spells_outputs=every[0].spells_outputs,
    )


def renamed(tokens: Sequence[object]) -> list[int]:
    """Each as the number of different ones before it came first."""
    names: dict[object, int] = {}
    return [names.setdefault(token, len(names)) for token in tokens]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def hit_tokens(requests: HashedRequests, index: str, block_size: int) -> int:
    """Of a cache that never evicts."""
    room = len(requests.hash_ids) // block_size + 2 * len(requests)
    cache = Cache(capacity_blocks=room, block_size=block_size, index=index)
    return replay(cache, [requests]).hit_tokens


def same(one: HashedRequests, other: HashedRequests) -> bool:
    columns = ("prompt_tokens", "output_tokens", "hash_ids", "starts")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


# Against the plain twin


@settings(max_examples=150, deadline=None)
@given(sharings, st.integers(1, 300), st.integers(1, 50))
def test_tokens_are_those_of_the_plain_twin(sharing: Sharing, tokens: int, batch: int) -> None:
    plain = list(served(sharing))
    every = list(chunks(sharing, tokens=tokens, batch=batch))
    fast = [request for part in every for request in unspelled(part)]
    assert [(len(p), len(o)) for p, o in fast] == [(len(r.prompt), len(r.output)) for r in plain]
    assert renamed([token for p, o in fast for token in p + o]) == renamed(
        [token for request in plain for token in request.prompt + request.output]
    )
    if len(sharing.parts) > 1:
        assert [int(one) for part in every for one in part.tenant] == [r.tenant for r in plain]
    else:
        assert all(part.tenant is None for part in every)
    for part in every:
        assert part.spells_outputs
        assert part.block_size == 1
        assert part.hash_ids.min() >= 0
        assert len(part.hash_ids) <= tokens or len(part) == 1
        assert np.array_equal(part.prompt_tokens + part.output_tokens, np.diff(part.starts))


@pytest.mark.parametrize("name", [*NAMES, "chat:2+agent+unique:3"])
def test_the_requests_do_not_hang_on_the_sizes_of_the_chunks(name: str) -> None:
    sharing = sharing_of(name, num_requests=300, seed=7)
    whole = made(sharing)
    assert len(whole) == 300
    for tokens, batch in ((1, 299), (5000, 7), (1 << 30, 64)):
        assert same(made(sharing, tokens=tokens, batch=batch), whole)


def test_a_seed_decides_everything_and_more_requests_begin_with_the_fewer() -> None:
    first, again, other = (made(sharing_of("tot", num_requests=200, seed=s)) for s in (5, 5, 6))
    assert same(first, again)
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens)
    assert same(made(sharing_of("tot", num_requests=500, seed=5)).first(200), first)


def test_memory_is_that_of_the_live_sessions() -> None:
    sharing = sharing_of(
        "chat", num_requests=10**7, prefix_tokens=20, turn_tokens=4, output_tokens=4
    )
    stream = chunks(sharing, tokens=1 << 14, batch=256)
    for _ in itertools.islice(stream, 20):
        pass
    tracemalloc.start()
    for part in itertools.islice(stream, 400):
        assert len(part)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20  # columns of one batch and one chunk: 400 would be 40 MiB


# What is shared


@pytest.mark.parametrize("concurrency", [1, 20])
def test_a_turn_begins_with_all_that_was_said_before(concurrency: int) -> None:
    sharing = sharing_of("chat", num_requests=200, seed=3, turns=5, concurrency=concurrency)
    said = unspelled(made(sharing))
    place = {prompt[-1]: at for at, (prompt, _) in enumerate(said)}
    turns: list[int] = []
    for at, (prompt, _) in enumerate(said):
        asked = [place[token] for token in prompt if token in place]
        assert asked == sorted(set(asked))
        assert asked[-1] == at
        turns.append(len(asked))
        if len(asked) > 1:
            before, answer = said[asked[-2]]
            assert turns[asked[-2]] == len(asked) - 1
            assert prompt[: len(before) + len(answer)] == before + answer
            assert len(prompt) > len(before) + len(answer)
    counts = np.bincount(turns, minlength=6)
    assert counts[0] == 0
    assert len(counts) == 6
    assert (np.diff(counts[1:]) <= 0).all()
    assert counts[1] - counts[5] <= concurrency
    assert (counts[1:] == 40).all() == (concurrency == 1)


@pytest.mark.parametrize("keep", [None, 1, 2, 4])
def test_siblings_share_exactly_their_parents_path(keep: int | None) -> None:
    part = sharing_of("tot", turns=3, branch=3, num_prefixes=1).parts[0]
    part = replace(part, concurrency=1, keep=keep)
    nodes = part.requests_per_session
    assert nodes == {None: 3 + 9 + 27, 1: 9, 2: 3 + 6 + 6, 4: 3 + 9 + 12}[keep]
    said = unspelled(made(Sharing(name="t", num_requests=4 * nodes, seed=1, parts=(part,))))
    root = shared(said[0][0], said[nodes][0])
    for first in range(0, len(said), nodes):
        session = said[first : first + nodes]
        paths = [[]] + [prompt + output for prompt, output in session]
        parents = []
        for siblings in zip(*[iter(session)] * 3, strict=True):
            depth = {shared(a[0], b[0]) for a, b in itertools.combinations(siblings, 2)}
            assert len(depth) == 1
            path = siblings[0][0][: depth.pop()]
            parents.append(paths.index(path) if path in paths else 0)
            if not parents[-1]:
                assert len(path) > root  # the problem as well
        assert parents[0] == 0
        assert 0 not in parents[1:]
        assert len(set(parents)) == len(parents)


def test_batched_requests_share_the_document_and_no_more() -> None:
    part = replace(sharing_of("batched").parts[0], concurrency=1, turn=fixed(9))
    said = unspelled(made(Sharing(name="b", num_requests=80, seed=1, parts=(part,))))
    for first in range(0, 80, 8):
        document = len(said[first][0]) - 9
        for one, other in itertools.combinations(said[first : first + 8], 2):
            assert shared(one[0], other[0]) == document
    assert all(shared(said[at][0], said[at + 8][0]) < len(said[at][0]) - 9 for at in range(72))


def test_nothing_of_unique_is_shared() -> None:
    requests = made(sharing_of("unique", num_requests=400))
    assert len(np.unique(requests.hash_ids)) == len(requests.hash_ids)
    assert hit_tokens(requests, "radix", 1) == hit_tokens(requests, "hash", 16) == 0


@pytest.mark.parametrize(("index", "block_size", "cached"), [("radix", 1, 40), ("hash", 16, 32)])
def test_few_shots_hits_are_those_of_the_arithmetic(
    index: str, block_size: int, cached: int
) -> None:
    part = replace(sharing_of("few-shot").parts[0], prefix=fixed(40))
    requests = made(Sharing(name="few-shot", num_requests=1000, seed=2, parts=(part,)))
    tasks = len(np.unique(requests.hash_ids[requests.starts[:-1]]))
    assert 50 < tasks <= 57
    assert hit_tokens(requests, index, block_size) == (1000 - tasks) * cached


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.0, 2.0])
def test_prefixes_come_as_often_as_zipfs_law_says(zipf: float) -> None:
    sharing = sharing_of(
        "system-prompts", num_requests=20_000, num_prefixes=10, zipf=zipf, seed=4,
        prefix_tokens=3, turn_tokens=1, output_tokens=1,
    )  # fmt: skip
    requests = made(sharing)
    _, counts = np.unique(requests.hash_ids[requests.starts[:-1]], return_counts=True)
    weights = np.arange(1, 11) ** -zipf
    expected = 20_000 * weights / weights.sum()
    assert len(counts) == 10
    assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi square, 9 degrees: 1 in 1,000


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_sharing_degree_is_the_share_of_sessions_with_a_shared_prefix(share: float) -> None:
    sharing = sharing_of(
        "system-prompts", num_requests=4000, share=share, num_prefixes=5, prefix_tokens=6,
        turn_tokens=1, output_tokens=1,
    )  # fmt: skip
    requests = made(sharing)
    _, counts = np.unique(requests.hash_ids[requests.starts[:-1]], return_counts=True)
    assert counts[counts > 1].sum() / 4000 == pytest.approx(share, abs=0.03)
    if not share:
        assert len(np.unique(requests.hash_ids)) == len(requests.hash_ids)
    # A private prefix is as long as the shared one that it takes the place of.
    alike = made(sharing_of("system-prompts", num_requests=4000, num_prefixes=5, prefix_tokens=6,
                            turn_tokens=1, output_tokens=1))  # fmt: skip
    assert np.array_equal(requests.prompt_tokens, alike.prompt_tokens)


def test_sessions_are_live_at_once_and_interleaved() -> None:
    for concurrency in (1, 8):
        sharing = sharing_of(
            "agent", num_requests=400, concurrency=concurrency, num_prefixes=0,
            turn_tokens=1, output_tokens=1, turns=10,
        )  # fmt: skip
        requests = made(sharing)
        sessions = requests.hash_ids[requests.starts[:-1]]
        changes = int((np.diff(sessions) != 0).sum())
        assert changes == 39 if concurrency == 1 else 320 < changes < 380
        first = {one: at for at, one in reversed(list(enumerate(sessions.tolist())))}
        last = {one: at for at, one in enumerate(sessions.tolist())}
        live = [sum(first[one] <= at <= last[one] for one in first) for at in range(400)]
        assert max(live) == concurrency


# Mixes


def test_a_mix_has_tenants_that_share_nothing_in_parts_by_weight() -> None:
    mix = sharing_of("few-shot:3+few-shot+agent:0.5", num_requests=3000, seed=9)
    assert mix.name == "few-shot:3+few-shot:1+agent:0.5"
    assert tenants(mix) == ("few-shot", "few-shot-2", "agent")
    requests = made(mix)
    assert requests.tenant is not None
    counts = np.bincount(requests.tenant)
    assert counts / 3000 == pytest.approx(np.array([3, 1, 0.5]) / 4.5, abs=0.03)
    of = np.repeat(requests.tenant, np.diff(requests.starts))
    tokens = [set(np.unique(requests.hash_ids[of == tenant]).tolist()) for tenant in range(3)]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(tokens, 2))
    # The first part is the workload alone, in its order.
    rows = np.flatnonzero(requests.tenant == 0)
    alone = made(sharing_of("few-shot", num_requests=len(rows), seed=9))
    assert np.array_equal(requests.prompt_tokens[rows], alone.prompt_tokens)
    assert np.array_equal(requests.hash_ids[of == 0], alone.hash_ids)


# Presets and parameters


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_makes_the_lengths_that_it_says(name: str) -> None:
    part = sharing_of(name).parts[0]
    # Few prefixes are drawn, each counts often: that noise is left out.
    prefix = fixed(round(part.prefix.mean)) if part.prefix else None
    part = replace(part, prefix=prefix, concurrency=1)
    count = 3000 // part.requests_per_session * part.requests_per_session
    sharing = Sharing(name=name, num_requests=count, seed=1, parts=(part,))
    every = list(chunks(sharing))
    prompts = np.concatenate([one.prompt_tokens for one in every])
    assert prompts.mean() == pytest.approx(sharing.mean_prompt_tokens, rel=0.06)
    assert prompts.max() <= part.max_prompt_tokens
    outputs = np.concatenate([one.output_tokens for one in every])
    assert outputs.mean() == pytest.approx(part.output.mean, rel=0.06)


def test_the_presets_have_what_is_published() -> None:
    agent = sharing_of("agent")
    assert agent.mean_prompt_tokens == pytest.approx(8596, abs=3)  # Mooncake, FAST 2025, table 2
    assert agent.mean_output_tokens == 182
    assert sharing_of("chat").parts[0].turns == 4
    thoughts = sharing_of("tot").parts[0]
    assert (thoughts.num_prefixes, thoughts.widths) == (3, (5, 25, 25))
    for preset in catalog.prefix_presets():
        assert preset.source
        assert preset.note
        for name in (preset.id, *preset.aliases):
            assert catalog.prefix_preset(name.upper().replace("-", " ")) == preset
        # The workload chat is older than the alias: without the kind, it is the one that is meant.
        assert catalog.preset_text(preset.id)[0] == "prefixes"
        assert catalog.preset_text(preset.id, ("prefixes",))[1].startswith(f"[{preset.id}]")
    assert catalog.preset_text("chat")[0] == "workloads"
    every = [name for one in catalog.prefix_presets() for name in (one.id, *one.aliases)]
    assert len(set(every)) == len(every)


def test_overrides_replace_the_presets_values_and_are_echoed() -> None:
    given = {
        "num_prefixes": 3, "prefix_tokens": 100, "zipf": 0.5, "share": 0.25, "session_tokens": 7,
        "turn_tokens": 50, "output_tokens": 20, "turns": 3, "branch": 2, "keep": 2,
        "concurrency": 9,
    }  # fmt: skip
    sharing = sharing_of("chat", num_requests=10, seed=4, **given)
    assert sharing.echo() == {
        "workload": "multi-turn-chat", "num_requests": 10, "seed": 4, "preset": "multi-turn-chat",
    } | given  # fmt: skip
    assert sharing.parts[0].prefix is not None
    assert sharing.parts[0].prefix.cap == 800  # 4,096 / 512 of the mean, as in the preset
    assert sharing_of("chat", turns=None) == sharing_of("chat")
    mix = sharing_of("chat+tot", turns=2).echo()
    assert [one["turns"] for one in mix["parts"]] == [2, 2]
    assert [one["tenant"] for one in mix["parts"]] == ["multi-turn-chat", "tree-of-thought"]


def test_what_is_set_to_none_is_gone_and_what_is_not_there_can_be_added() -> None:
    for none in ({"num_prefixes": 0}, {"prefix_tokens": 0}):
        part = sharing_of("chat", **none).parts[0]
        assert (part.num_prefixes, part.prefix) == (0, None)
    assert sharing_of("batched", session_tokens=0).parts[0].session is None
    requests = made(sharing_of("unique", num_prefixes=1, prefix_tokens=30.4, num_requests=50))
    prompts = [prompt for prompt, _ in unspelled(requests)]
    assert {shared(prompts[0], other) for other in prompts[1:]} == {30}


@pytest.mark.parametrize(
    ("name", "given", "message", "hint"),
    [
        ("chats", {}, "no workload with shared prefixes is called 'chats'", "Did you mean chat"),
        ("chat+", {}, "'chat+' is no workload", "chat:3+agent:1"),
        ("chat:0+agent", {}, "'chat:0+agent' is no workload", "weights above 0"),
        ("chat:x", {}, "'chat:x' is no workload", "weights above 0"),
        ("chat:nan", {}, "'chat:nan' is no workload", "weights above 0"),
        ("+".join(["tot"] * 65), {}, "a mix of 65", "64 at most"),
        ("chat", {"num_requests": 0}, "--num-requests: 0 is not from 1", "fewer"),
        ("chat", {"seed": -1}, "--seed: -1 is below 0", "from 0 on"),
        ("chat", {"share": 1.01}, "--share: 1.01 is not a number from 0 to 1", "the preset's"),
        ("chat", {"zipf": float("nan")}, "--zipf: nan is not a number", "the preset's"),
        ("chat", {"turns": 1.5}, "--turns: 1.5 is not a whole number from 1 to 1,024", "another"),
        ("chat", {"branch": 0}, "--branch: 0 is not a whole number", "another"),
        ("chat", {"prefix_tokens": 0.5}, "--prefix-tokens: a mean of 0.5", "1 or more"),
        ("chat", {"turn_tokens": 0}, "--turn-tokens: 0 is not", "another"),
        ("unique", {"num_prefixes": 5}, "of what length are 5?", "--prefix-tokens"),
        ("unique", {"prefix_tokens": 5}, "how many of 5 tokens?", "--num-prefixes"),
    ],
)
def test_what_is_typed_wrongly_is_a_usage_error(
    name: str, given: dict[str, float], message: str, hint: str
) -> None:
    with pytest.raises(KvtoolError) as caught:
        sharing_of(name, **given)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == USAGE


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("chat", {"turns": 1024, "concurrency": 1}, "prompts of up to"),
        ("tot", {"turns": 30, "branch": 4, "keep": 60_000}, "are live at once"),
        ("agent", {"concurrency": 65_536, "turns": 20}, "65,536 sessions of 20 requests"),
        ("few-shot", {"num_prefixes": 2**20, "prefix_tokens": 2**18}, "1,048,576 prefixes"),
        ("chat", {"num_requests": 2**32}, "more than 8,589,934,592 tokens"),
    ],
)
def test_what_is_too_large_is_refused(name: str, given: dict[str, int], message: str) -> None:
    with pytest.raises(KvtoolError) as caught:
        sharing_of(name, **given)
    assert message in caught.value.message
    assert (caught.value.code, caught.value.exit_code) == ("too_large", FAILED)
    assert "take " in caught.value.hint


def test_the_most_that_the_hint_of_a_refusal_names_is_taken() -> None:
    with pytest.raises(KvtoolError) as caught:
        sharing_of("chat", num_requests=MOST_TOKENS)
    most = int(caught.value.hint.split()[1].replace(",", ""))
    assert sharing_of("chat", num_requests=most).num_requests == most
    with pytest.raises(KvtoolError):
        sharing_of("chat", num_requests=most + 1)


def test_no_override_of_another_name_is_taken() -> None:
    with pytest.raises(TypeError, match="no turn"):
        sharing_of("chat", turn=3)
