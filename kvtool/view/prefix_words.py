"""What `kvtool prefix` says of its rows: the denominator, ceiling and knee, why, and which index pays."""

from __future__ import annotations

from collections.abc import Sequence

from kvtool.run import Row
from kvtool.units import format_bytes, format_seconds
from kvtool.view.prefix_kinds import Series, capacity
from kvtool.view.words import counted

DENOMINATOR = (
    "Hit rate: hit tokens of all prompt tokens, those of rejected requests included; requests one after "
    "the other, each cached before the next."
)
ALIKE = 0.005
"""Hit tokens that differ by less count as the same."""


def sentences(many: Sequence[Series]) -> list[str]:
    """All that there is to say."""
    said = [DENOMINATOR, *_assumptions(many)]
    several = len({one.prompts for one in many}) > 1
    for one in many:
        label = f"{one.prompts}, {one.name}" if several else one.name
        said += [f"{label}: {text}" for text in (*_shape(one), *_zero(one), *_explained(one), *_tiers(one))]
    return said + _verdicts(many, several)


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


def _shape(one: Series) -> list[str]:
    """Ceiling and knee, where there is a curve."""
    last = one.rows[-1]
    queried, ceiling = last["queried_tokens"], one.ceiling
    if not ceiling or not queried:
        return []
    said = [f"the ceiling is {ceiling / queried:.2%}, in a cache without end"]
    if len(one.rows) > 1:
        full = next((row for row in one.rows if row["hit_tokens"] >= ceiling), None)
        if full is not None:
            said[0] += f", reached by {capacity(full)}"
        knee = one.knee
        if knee is not None:
            said.append(
                f"the knee is at {capacity(knee)} ({knee['hit_rate']:.2%}): beyond it, more memory buys "
                "less than the average up to the last capacity"
            )
    return [f"{text}." for text in said]


def _zero(one: Series) -> list[str]:
    """The reason for a hit rate of 0, at the largest capacity that has it."""
    row = next((row for row in reversed(one.rows) if not row["hit_tokens"]), None)
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


def _tiers(one: Series) -> list[str]:
    """Tiers that take longer to load than to compute."""
    said = []
    for row in one.replayed:
        for tier in row["tiers"] or ():
            if tier["saved_s"] is None or not tier["hit_tokens"]:
                continue
            pays = tier["saved_s"] > 0
            said.append(
                f"{tier['tier']} behind {capacity(row)} {'pays' if pays else 'does not pay'}: loading its hits "
                f"takes {format_seconds(tier['load_s'])}, computing them {format_seconds(tier['recompute_s'])}."
            )
    return said


# -- radix against hash


def _verdicts(many: Sequence[Series], several: bool) -> list[str]:
    """A line for each pair of a hash index and a radix tree over the same prompts."""
    said = []
    for tree in many:
        if tree.rows[0]["index"] != "radix":
            continue
        for other in many:
            rows = _pairs(other, tree)
            if rows:
                label = f"{tree.prompts}: " if several else ""
                said.append(f"{label}{tree.name} against {other.name}: {_verdict(rows)}")
    return said


def _pairs(other: Series, tree: Series) -> list[tuple[Row, Row]]:
    """Rows of as many tokens, hash and radix, both replayed; none if they are not alike else."""
    one, two = other.rows[0], tree.rows[0]
    if one["index"] != "hash" or other.prompts != tree.prompts:
        return []
    if any(one[name] != two[name] for name in ("policy", "cache_outputs")):
        return []
    size = max(one["block_size"], two["block_size"])
    by_size = {row["capacity_tokens"] // size: row for row in other.replayed}
    return [
        (by_size[row["capacity_tokens"] // size], row)
        for row in tree.replayed
        if row["capacity_tokens"] // size in by_size
    ]


def _verdict(rows: Sequence[tuple[Row, Row]]) -> str:
    gains = [_gain(one, two) for one, two in rows]
    best = max(range(len(rows)), key=lambda at: gains[at])
    worst = min(range(len(rows)), key=lambda at: gains[at])
    one, two = rows[-1]
    if not any(row["hit_tokens"] for pair in rows for row in pair):
        found = "neither finds a hit"
    elif max(map(abs, gains)) < ALIKE:
        found = f"the same hits within {ALIKE:.1%}: the block hash suffices"
    elif gains[best] == gains[worst]:
        found = _more(gains[best], *rows[best])
    else:
        found = f"{_more(gains[best], *rows[best])} at {capacity(rows[best][1])}, {_more(gains[worst], *rows[worst])} at {capacity(rows[worst][1])}"
    return f"{found}. {_price(one, two)}"


def _gain(one: Row, two: Row) -> float:
    """Hit tokens of the tree beyond the hash's, as a share of these."""
    return float((two["hit_tokens"] - one["hit_tokens"]) / max(1, one["hit_tokens"]))


def _more(gain: float, one: Row, two: Row) -> str:
    if not one["hit_tokens"]:
        return "hits where the hash finds none" if two["hit_tokens"] else "no hits in either"
    if abs(gain) < ALIKE:
        return "as many hit tokens"
    each = abs(two["hit_tokens"] - one["hit_tokens"]) / max(1, two["requests"])
    return f"{abs(gain):.1%} {'more' if gain > 0 else 'fewer'} hit tokens ({each:,.1f} a request)"


def _price(one: Row, two: Row) -> str:
    """Time and memory of both, at the last capacity."""
    cost = {
        row["index"]: row["index_s_per_request"] + row["naming_s_per_request"] for row in (one, two)
    }
    text = (
        f"A request costs the hash {format_seconds(cost['hash'])} (of it naming "
        f"{format_seconds(one['naming_s_per_request'])}), the tree {format_seconds(cost['radix'])}; "
        f"they keep {format_bytes(one['index_bytes'])} and {format_bytes(two['index_bytes'])}"
    )
    prefill = two["uncached_prefill_s_mean"]
    if prefill:
        text += (
            f". That is {cost['hash'] / prefill:.3%} and {cost['radix'] / prefill:.3%} of its prefill"
        )
    return f"{text}."
