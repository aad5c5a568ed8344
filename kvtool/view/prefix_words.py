"""What `kvtool prefix` says of its rows: the denominator, ceiling and knee, why, and which index pays."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvtool.run import Row
from kvtool.units import format_bytes, format_seconds
from kvtool.view.prefix_kinds import Series, by_prompts, capacity
from kvtool.view.words import counted

DENOMINATOR = (
    "Hit rate: hit tokens of all prompt tokens, those of rejected requests included; requests one after "
    "the other, each cached before the next."
)
MOST_ASKED = 4
MEANING = (
    "Lost: evicted before they came again, or never cached since their request did not fit. Rounded: shared, "
    "but no full block. Last block: that of the last token is always computed. New: no prompt had them before."
)
ALIKE = 0.005
"""Hit tokens that differ by less count as the same."""


def sentences(many: Sequence[Series]) -> list[str]:
    """What it comes to, then what the words mean."""
    groups = by_prompts(many)
    said: list[str] = []
    if not many:
        return said
    for group in groups:
        named = f"{group[0].prompts}: " if len(groups) > 1 else ""
        said += [f"{named}{text}" for text in _about(group)]
    rows = [row for one in many for row in one.replayed]
    if any(row["explained"] for row in rows):
        return said
    meaning = [MEANING] if many[0].rows[0]["new_tokens"] is not None else []
    return [*said, *_memory(many), *_assumptions(many), *meaning, DENOMINATOR]


def _memory(many: Sequence[Series]) -> list[str]:
    """Whose bytes they are."""
    row = many[0].rows[0]
    if row["bytes_per_token"] is None:
        return []
    return [f"Memory is that of {row['model']}: {row['bytes_per_token']:,} B a token on a GPU."]


def _about(group: Sequence[Series]) -> list[str]:
    """Of one set of prompts: its ceiling, each cache where there is something to say, the verdicts."""
    explained = [f"{one.name}: {text}" for one in group for text in _explained(one)]
    if explained:
        return explained
    said = _ceilings(group)
    for one in group:
        texts = (*_knee(one), *_zero(one), *_worth(one), *_tiers(one))
        said += [f"{one.name}: {text}" for text in texts]
    return said + _verdicts(group)


def _ceilings(group: Sequence[Series]) -> list[str]:
    """What a cache without end finds, each figure with the caches that it is of."""
    shares: dict[str, list[str]] = {}
    for one in group:
        queried = one.rows[-1]["queried_tokens"]
        if one.ceiling:
            shares.setdefault(f"{one.ceiling / queried:.2%}", []).append(one.name)
    if len(shares) == 1:
        return [f"A cache without end finds {next(iter(shares))}."]
    figures = ", ".join(f"{share} ({'; '.join(names)})" for share, names in shares.items())
    return [f"A cache without end finds {figures}."] if shares else []


def _assumptions(many: Sequence[Series]) -> list[str]:
    """Blocks of a trace that are cut or merged."""
    rows = [one.rows[0] for one in many if one.rows[0]["made"] is None]
    finer = [row for row in rows if row["block_size"] < row["trace_block_size"]]
    coarser = [row for row in rows if row["block_size"] > row["trace_block_size"]]
    said = []
    if finer:
        said.append(
            f"The trace names blocks of {finer[0]['trace_block_size']:,} tokens; cut finer, two that differ "
            "are taken to differ from their first token on: a real cache of finer blocks finds as much or more."
        )
    if coarser:
        said.append(
            f"Blocks of {coarser[0]['block_size']:,} tokens are made of the trace's of "
            f"{coarser[0]['trace_block_size']:,}: equal where all of these are equal."
        )
    return said


def _knee(one: Series) -> list[str]:
    """Where a curve bends, and where it ends."""
    knee = one.knee
    if knee is None:
        return []
    full = one.reaching(1.0)
    most = f"; {capacity(full)} find all there is to find" if full is not None else ""
    return [f"the knee is at {capacity(knee)}, with {knee['hit_rate']:.2%}{most}."]


def _zero(one: Series) -> list[str]:
    """The reason for a hit rate of 0: of the largest capacity, or of the largest of a few that has it."""
    rows = one.rows if len(one.rows) <= MOST_ASKED else one.rows[-1:]
    row = next((row for row in reversed(rows) if not row["hit_tokens"]), None)
    if row is None or row["new_tokens"] is None:
        return []
    return [f"no hits at {capacity(row)}: {_reason(row)}"]


def _reason(row: Row) -> str:
    size, longest = row["block_size"], row["longest_shared"]
    if row["rejected"] == row["requests"]:
        return (
            f"every request is larger than the cache of {counted(row['capacity_blocks'], 'block')}. "
            "Give it more."
        )
    if row["lost_tokens"]:
        gone = (
            "evicted before they come again"
            if row["evicted_blocks"]
            else "of requests that do not fit"
        )
        return (
            f"capacity. A cache without end would find {row['lost_tokens']:,} tokens; here they are {gone}. "
            "--capacity all says how much it takes."
        )
    if row["last_block_tokens"]:
        return (
            f"prompts come again, but no longer than one block of {size:,}, and the block of a prompt's last "
            "token is always computed (the n − 1 rule). Smaller blocks would hit."
        )
    if longest:
        return (
            f"the longest prefix that two prompts share has {counted(longest, 'token')}, and only full "
            f"blocks of {size:,} are cached. Smaller blocks would hit."
        )
    if row["requests"] == 1:
        return "a cold start. There is one request, and nothing before it."
    return "no two prompts begin with the same token. There is nothing to share."


def _explained(one: Series) -> list[str]:
    said = []
    for row in one.replayed:
        found = row["explained"]
        if found is None:
            continue
        shared = (
            f"earlier prompts had its first {found['shared_tokens']:,}"
            if found["shared_tokens"]
            else "no earlier prompt begins like it"
        )
        said.append(
            f"at {capacity(row)} request {found['request']:,} found {found['hit_tokens']:,} of its "
            f"{counted(found['prompt_tokens'], 'token')}; {shared}. {_end(found, row)}"
        )
    return said


def _end(found: Row, row: Row) -> str:
    size, last, hits = row["block_size"], found["last_request"], found["hit_tokens"]
    after = f"The hit ends after {hits:,} tokens" if hits else "There is no hit"
    ends = {
        "rejected": f"It is larger than the cache of {counted(row['capacity_blocks'], 'block')}, and rejected.",
        "lost": f"{after}: the next block had been cached, and was evicted.",
        "unserved": f"{after}: who had the next block did not fit into the cache, and was rejected.",
        "last block": f"{after}: the block of the last token is always computed.",
        "rounded": f"{after}: what is shared beyond does not fill a block of {size:,}.",
        "new": f"{after}: no earlier prompt goes on like this one."
        if found["shared_tokens"]
        else "",
    }
    text = ends[found["ended_by"]]
    if found["ended_by"] == "lost" and last is not None:
        text += f" Request {last:,} was the last to have it, {found['request'] - last:,} requests before."
    if found["ended_by"] in ("lost", "rejected", "unserved") and found["needed_blocks"]:
        blocks = found["needed_blocks"]
        memory = blocks * size * row["bytes_per_token"] if row["bytes_per_token"] else None
        text += (
            f" All {found['findable_tokens']:,} tokens that can be found would be from {blocks:,} blocks on"
            f"{f' ({format_bytes(memory)})' if memory else ''}, by recency over block hashes."
        )
    return text.strip()


def _worth(one: Series) -> list[str]:
    """The time of a prefill with hits and without, at the largest capacity that was replayed."""
    row = one.replayed[-1]
    if row["cached_prefill_s_mean"] is None:
        return []
    return [
        f"at {capacity(row)} hits save {row['saved_flops_share']:.1%} of the FLOPs of the prefill; on "
        f"{row['gpu']} the mean prefill{' of those that fit' if row['rejected'] else ''} takes {format_seconds(row['cached_prefill_s_mean'])} in place of "
        f"{format_seconds(row['uncached_prefill_s_mean'])}, without queueing (an estimate). Decode costs the "
        "same."
    ]


def _tiers(one: Series) -> list[str]:
    """What they find together, and whether each takes longer to load than to compute."""
    said = []
    for row in one.replayed:
        if not row["tiers"]:
            continue
        total = sum(tier["hit_rate"] for tier in row["tiers"])
        text = f"at {capacity(row)} with its tiers {total:.2%} are hits"
        if row["tiers"][-1]["prefill_s_mean"] is not None:
            means = [format_seconds(row["tiers"][place]["prefill_s_mean"]) for place in (0, -1)]
            text += (
                f", and the mean prefill takes {means[1]}, loading included, in place of {means[0]}"
            )
        said.append(f"{text}.")
        said += [text for tier in row["tiers"][1:] if (text := _tier(tier))]
    return said


def _tier(tier: Row) -> str:
    if not tier["hit_tokens"]:
        return f"{tier['tier']} is written to and never hit."
    if tier["saved_s"] is None:
        return ""
    times = (
        f"loading its hits takes {format_seconds(tier['load_s'])}, computing them "
        f"{format_seconds(tier['recompute_s'])}"
    )
    if tier["saved_s"] <= 0:
        return f"{tier['tier']} does not pay: {times}."
    if tier["write_s"] > tier["saved_s"]:
        writing = format_seconds(tier["write_s"])
        return (
            f"{tier['tier']} pays only if its writes, {writing}, overlap with computing: {times}."
        )
    return f"{tier['tier']} pays: {times}."


# -- radix against hash


def _verdicts(group: Sequence[Series]) -> list[str]:
    """A line for each hash index and radix tree that are alike else."""
    trees = [one for one in group if one.rows[0]["index"] == "radix"]
    return [
        f"{tree.name} against {other.name}: {_verdict(rows, other.knee)}"
        for tree in trees
        for other in group
        if (rows := _pairs(other, tree))
    ]


def _pairs(other: Series, tree: Series) -> list[tuple[Row, Row]]:
    """Rows of as many tokens, hash and radix, both replayed; none if they are not alike else."""
    one, two = other.rows[0], tree.rows[0]
    if one["index"] != "hash" or any(
        one[name] != two[name] for name in ("policy", "cache_outputs")
    ):
        return []
    size = max(one["block_size"], two["block_size"])
    by_size = {row["capacity_tokens"] // size: row for row in other.replayed}
    pairs = [(by_size.get(row["capacity_tokens"] // size), row) for row in tree.replayed]
    return [(row, twin) for row, twin in pairs if row is not None]


def _verdict(rows: Sequence[tuple[Row, Row]], knee: Row | None) -> str:
    """Hits at the knee and at the largest capacity, by how far they differ at most, and the price."""
    serving = [pair for pair in rows if not any(row["rejected"] for row in pair)] or list(rows)
    if not any(row["hit_tokens"] for pair in serving for row in pair):
        return f"neither finds a hit. {_price(*rows[-1])}"
    if all(abs(_gain(pair)) < ALIKE for pair in serving):
        return (
            f"as many hit tokens within {ALIKE:.1%}: the block hash suffices. {_price(*rows[-1])}"
        )
    told = [serving[-1]]
    if knee is not None:
        told.insert(
            0,
            min(
                serving, key=lambda pair: abs(pair[0]["capacity_blocks"] - knee["capacity_blocks"])
            ),
        )
    told = [pair for place, pair in enumerate(told) if pair is not told[place - 1] or not place]
    text = ", ".join(f"{_more(pair)} at {capacity(pair[1])}" for pair in told)
    far = max(serving, key=lambda pair: abs(_gain(pair)))
    if (
        math.isfinite(_gain(far))
        and abs(_gain(far)) > 2 * max(abs(_gain(pair)) for pair in told)
        and abs(_gain(far)) >= ALIKE
    ):
        text += f"; the difference is largest, {_gain(far):+.1%}, at {capacity(far[1])}"
    return f"{text}. {_price(*rows[-1])}"


def _gain(pair: tuple[Row, Row]) -> float:
    """Hit tokens of the tree beyond the hash's, as a share of these; infinite where the hash has none."""
    one, two = pair
    if not one["hit_tokens"]:
        return math.inf if two["hit_tokens"] else 0.0
    return float(two["hit_tokens"] / one["hit_tokens"] - 1)


def _more(pair: tuple[Row, Row]) -> str:
    """By how much, and by what: the tail of a block, or whole leaves that go."""
    one, two = pair
    gain, each = _gain(pair), abs(two["hit_tokens"] - one["hit_tokens"]) / max(1, two["requests"])
    if abs(gain) < ALIKE:
        return "as many hit tokens"
    if gain < 0:
        why = "" if two["rejected"] else ", as it evicts whole leaves"
        return f"{-gain:.1%} fewer hit tokens ({each:,.1f} a request{why})"
    if math.isinf(gain):
        return f"the hash finds none, the tree {each:,.1f} hit tokens a request"
    by = ", by its smaller blocks" if two["block_size"] < one["block_size"] else ""
    return f"{gain:.1%} more hit tokens ({each:,.1f} a request{by})"


def _price(one: Row, two: Row) -> str:
    """Time and memory of both, as tried in Python on the first requests."""
    kept = f"They keep {format_bytes(one['index_bytes'])} and {format_bytes(two['index_bytes'])}"
    costs = [row["index_s_per_request"] for row in (one, two)]
    if None in costs:
        return f"{kept}."
    text = (
        f"Tried in Python, a request takes the hash {format_seconds(costs[0])}, of it "
        f"{format_seconds(one['naming_s_per_request'])} to name blocks, and the tree {format_seconds(costs[1])}"
    )
    prefill = two["uncached_prefill_s_mean"]
    if prefill:
        text += f": {costs[0] / prefill:.2%} and {costs[1] / prefill:.2%} of its prefill"
    return f"{text}. {kept}."
