"""What `kvtool prefix` says of its rows: the denominator, ceiling and knee, why, and which index pays."""

from __future__ import annotations

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
    "Lost: evicted before they came again. Rounded: shared, but no full block. Last block: that of the "
    "last token is always computed. New: no prompt had them before."
)
ALIKE = 0.005
"""Hit tokens that differ by less count as the same."""


def sentences(many: Sequence[Series]) -> list[str]:
    """All that there is to say."""
    said = [
        DENOMINATOR,
        *([MEANING] if many[0].rows[0]["new_tokens"] is not None else []),
        *_assumptions(many),
    ]
    groups = by_prompts(many)
    for group in groups:
        named = f"{group[0].prompts}: " if len(groups) > 1 else ""
        said += [f"{named}{text}" for text in _about(group)]
    return said


def _about(group: Sequence[Series]) -> list[str]:
    """Of one set of prompts: its ceiling, each cache where there is something to say, the verdicts."""
    said = _ceilings(group)
    for one in group:
        texts = (*_knee(one), *_zero(one), *_explained(one), *_worth(one), *_tiers(one))
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
    said = f"the knee is at {capacity(knee)}, with {knee['hit_rate']:.2%}"
    full = next((row for row in one.rows if row["hit_tokens"] >= one.ceiling), None)
    if full is not None:
        said += f"; {capacity(full)} find all there is to find"
    return [f"{said}."]


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
        return (
            f"capacity. A cache without end would find {row['lost_tokens']:,} tokens; here they are evicted "
            "before they come again. --capacity all says how much it takes."
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
        said.append(
            f"request {found['request']:,} at {capacity(row)} found {found['hit_tokens']:,} of its "
            f"{counted(found['prompt_tokens'], 'token')}; earlier prompts had its first "
            f"{found['shared_tokens']:,}. {_end(found, row)}"
        )
    return said


def _end(found: Row, row: Row) -> str:
    size, last = row["block_size"], found["last_request"]
    after = f"after {found['hit_tokens']:,} tokens"
    ends = {
        "rejected": f"It is larger than the cache of {counted(row['capacity_blocks'], 'block')}, and rejected.",
        "lost": f"The next block, {after}, was cached and is evicted.",
        "last block": f"The hit ends {after}: the block of the last token is always computed.",
        "rounded": f"The hit ends {after}: what is shared beyond does not fill a block of {size:,}.",
        "new": f"The hit ends {after}: no earlier prompt goes on like this one.",
    }
    text = ends[found["ended_by"]]
    if found["ended_by"] == "lost" and last is not None:
        text += f" Request {last:,} was the last to have it, {found['request'] - last:,} requests before."
    if found["ended_by"] in ("lost", "rejected") and found["needed_blocks"]:
        text += (
            f" All {found['findable_tokens']:,} tokens that can be found would be from "
            f"{found['needed_blocks']:,} blocks on (hash, lru)."
        )
    return text


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
    """Tiers that take longer to load than to compute."""
    said = []
    for row in one.replayed:
        for tier in row["tiers"] or ():
            if not tier["hit_tokens"] and tier["tier"] != "gpu":
                said.append(f"{tier['tier']} behind {capacity(row)} is written to and never hit.")
            if tier["saved_s"] is None or not tier["hit_tokens"]:
                continue
            pays = tier["saved_s"] > 0
            said.append(
                f"{tier['tier']} behind {capacity(row)} {'pays' if pays else 'does not pay'}: loading its hits "
                f"takes {format_seconds(tier['load_s'])}, computing them {format_seconds(tier['recompute_s'])}."
            )
    return said


# -- radix against hash


def _verdicts(group: Sequence[Series]) -> list[str]:
    """A line for each hash index and radix tree that are alike else."""
    trees = [one for one in group if one.rows[0]["index"] == "radix"]
    return [
        f"{tree.name} against {other.name}: {_verdict(rows)}"
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


def _verdict(rows: Sequence[tuple[Row, Row]]) -> str:
    """Hits by how far they differ at most, and the price of both at the last capacity."""
    hits = [max(row["hit_tokens"] for row in pair) for pair in rows]
    worth = [pair for pair, most in zip(rows, hits, strict=True) if most > max(hits) / 10]
    if not worth or not max(hits):
        return f"neither finds a hit. {_price(*rows[-1])}"
    most, least = (pick(worth, key=_gain) for pick in (max, min))
    if _gain(most) < ALIKE and _gain(least) > -ALIKE:
        text = f"as many hit tokens within {ALIKE:.1%}: the block hash suffices"
    elif most is least or len(worth) == 1:
        text = _more(most)
    else:
        ends = [one for one in (most, least) if abs(_gain(one)) >= ALIKE]
        text = ", ".join(f"{_more(one)} at {capacity(one[1])}" for one in ends)
    return f"{text}. {_price(*rows[-1])}"


def _gain(pair: tuple[Row, Row]) -> float:
    """Hit tokens of the tree beyond the hash's, as a share of these."""
    one, two = pair
    return float((two["hit_tokens"] - one["hit_tokens"]) / max(1, one["hit_tokens"]))


def _more(pair: tuple[Row, Row]) -> str:
    """By how much, and by what: the tail of a block, or whole leaves that go."""
    one, two = pair
    gain, each = _gain(pair), abs(two["hit_tokens"] - one["hit_tokens"]) / max(1, two["requests"])
    if abs(gain) < ALIKE:
        return "as many hit tokens"
    if gain < 0:
        return f"{-gain:.1%} fewer hit tokens ({each:,.1f} a request, as it evicts whole leaves)"
    by = ", by its smaller blocks" if two["block_size"] < one["block_size"] else ""
    return f"{gain:.1%} more hit tokens ({each:,.1f} a request{by})"


def _price(one: Row, two: Row) -> str:
    """Time and memory of both."""
    costs = [row["index_s_per_request"] + row["naming_s_per_request"] for row in (one, two)]
    text = (
        f"A request takes the hash {format_seconds(costs[0])}, of it {format_seconds(one['naming_s_per_request'])} "
        f"to name blocks, and the tree {format_seconds(costs[1])}"
    )
    prefill = two["uncached_prefill_s_mean"]
    if prefill:
        text += f": {costs[0] / prefill:.3%} and {costs[1] / prefill:.3%} of its prefill"
    return f"{text}; they keep {format_bytes(one['index_bytes'])} and {format_bytes(two['index_bytes'])}."
