"""Why an engine's bytes differ from the mathematics: reasons that the two rows themselves prove."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view.words import counted

LOCAL = ("sliding", "chunked")
POOLS = ("compressed", "indexer")
Kind = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A reason, and whether it makes the engine's bytes more or less."""

    more: bool
    text: str


def held(ideal: Row, other: Row) -> list[Reason]:
    """Why transformers' cache object is not as large as the mathematics says."""
    if other["kv_dtype"] != ideal["kv_dtype"]:
        # Every byte then has another width, and what else may differ cannot be told from it.
        more = other["total_bytes"] > ideal["total_bytes"]
        return [Reason(more=more, text=f"K and V are kept in {other['kv_dtype']}")]
    pairs = _pairs(ideal, other)
    found = [*_window_tokens(pairs, other), *_own_tokens(pairs), *_shapes(pairs)]
    return [*found, *_pending(pairs), *_states_held(ideal, other)]


def _pairs(ideal: Row, other: Row) -> list[tuple[Kind, Kind]]:
    """The same layers in both rows; kinds that one of them splits differently are left out."""
    pairs: list[tuple[Kind, Kind]] = []
    for name in dict.fromkeys(kind["kind"] for kind in ideal["kinds"]):
        needed = [kind for kind in ideal["kinds"] if kind["kind"] == name]
        found = [kind for kind in other["kinds"] if kind["kind"] == name]
        if [kind["layers"] for kind in needed] == [kind["layers"] for kind in found]:
            pairs += zip(needed, found, strict=True)
    return pairs


def _window_tokens(pairs: list[tuple[Kind, Kind]], other: Row) -> Iterator[Reason]:
    local = [(need, has) for need, has in pairs if need["kind"] in LOCAL]
    if any(need["tokens"] - has["tokens"] == 1 for need, has in local):
        text = "a window layer keeps window − 1 tokens, and the next one completes it"
        yield Reason(more=False, text=text)
    if any(need["tokens"] < other["context_tokens"] <= has["tokens"] for need, has in local):
        yield Reason(more=True, text="window layers keep every token")
    elif any(has["tokens"] - need["tokens"] == 1 for need, has in local):
        yield Reason(more=True, text="a window layer keeps a token more than its window")


def _own_tokens(pairs: list[tuple[Kind, Kind]]) -> Iterator[Reason]:
    if any(has["tokens"] - need["tokens"] == 1 for need, has in pairs if need["kind"] == "full"):
        yield Reason(more=True, text="generate() puts a token of its own into the cache")


def _shapes(pairs: list[tuple[Kind, Kind]]) -> Iterator[Reason]:
    """K and V that are not stored with the heads or widths that would do."""
    if any(has["kv_heads"] > need["kv_heads"] for need, has in pairs):
        text = "K and V are repeated to every query head before they are cached"
        yield Reason(more=True, text=text)
    if any(has["v_head_dim"] and not need["v_head_dim"] for need, has in pairs):
        yield Reason(more=True, text="K and V are two tensors where one would do")
    keys = [(need, has) for need, has in pairs if need["kind"] == "indexer"]
    for need, has in keys:
        if has["k_head_dim"] > need["k_head_dim"]:
            text = f"an indexer's key has {has['k_head_dim']} values, not {need['k_head_dim']}"
            yield Reason(more=True, text=text)
            return


def _pending(pairs: list[tuple[Kind, Kind]]) -> Iterator[Reason]:
    pools = [(need, has) for need, has in pairs if need["kind"] in POOLS]
    if any(need["state_bytes"] and has["bytes"] < need["bytes"] for need, has in pools):
        text = "a pool's pending tokens are counted as they are, not at their most"
        yield Reason(more=False, text=text)


def _states_held(ideal: Row, other: Row) -> Iterator[Reason]:
    need, has = (
        sum(k["state_bytes"] for k in row["kinds"] if k["kind"] not in POOLS)
        for row in (ideal, other)
    )
    if has == need:
        return
    if not has:
        yield Reason(more=False, text="its states live on the modules, outside the cache")
    elif has > need and not other["conv_bytes"] % (has - need) and other["conv_bytes"] > has - need:
        # One of k columns, exactly: a convolution of k taps needs k − 1.
        taps = other["conv_bytes"] // (has - need)
        yield Reason(more=True, text=f"convolutions keep {taps} columns, not {taps - 1}")
    elif not other["conv_bytes"] and has * 2 == need and other["dtype"] in ("fp16", "bf16"):
        yield Reason(more=False, text=f"states are kept in the model's dtype, {other['dtype']}")
    else:
        yield from _states_take(has, need)


def _states_take(has: int, need: int) -> Iterator[Reason]:
    said, instead = format_bytes(has), format_bytes(need)
    if said != instead:
        yield Reason(more=has > need, text=f"states take {said}, not {instead}")


# --- vLLM -----------------------------------------------------------------------------------------


def reserved(ideal: Row, other: Row) -> list[Reason]:
    """Why vLLM does not reserve just what the mathematics says."""
    reasons: list[Reason] = []
    if other["max_model_len"] > other["context_tokens"]:
        text = f"a request is as long as --max-model-len {other['max_model_len']:,}"
        reasons.append(Reason(more=True, text=text))
    return [
        *reasons,
        *_rounded(ideal, other),
        *_windows(ideal, other),
        *_encoder(ideal, other),
        *_states_reserved(ideal, other),
        *_latents(ideal, other),
        *_spread(ideal, other),
    ]


def _rounded(ideal: Row, other: Row) -> Iterator[Reason]:
    sizes = sorted(
        {
            group["block_size"]
            for group in other["groups"]
            if group["kind"] in ("full", "latent")
            and group["block_size"] != ideal["block_size"]
            and group["blocks_per_request"] * group["block_size"] * other["dcp"]
            > other["max_model_len"]
        }
    )
    if sizes:
        shared = f" on each of {other['dcp']} ranks" if other["dcp"] > 1 else ""
        text = f"tokens are rounded up to blocks of {' or '.join(map(str, sizes))}{shared}"
        yield Reason(more=True, text=text)


def _windows(ideal: Row, other: Row) -> Iterator[Reason]:
    windows = [kind["window"] for kind in ideal["kinds"] if kind["kind"] in LOCAL]
    windows = [window for window in windows if window is not None]
    groups = {group["kind"] for group in other["groups"]} & set(LOCAL)
    length = other["max_model_len"]
    if not windows:
        return
    if min(windows) >= length:
        if "sliding" in groups:
            text = "a window layer has one block more: its window need not start at a block's edge"
            yield Reason(more=True, text=text)
    elif groups:
        flight = other["max_batched_tokens"] * other["batches_in_flight"]
        every = ", every token here" if min(windows) - 1 + flight >= length else ""
        text = f"a window layer may hold its window and the {flight:,} tokens in flight besides"
        yield Reason(more=True, text=text + every)
    else:
        why = "" if other["hybrid"] else ", the hybrid KV cache manager being off"
        yield Reason(more=True, text=f"window layers keep every token{why}")


def _encoder(ideal: Row, other: Row) -> Iterator[Reason]:
    for group in other["groups"]:
        tokens, need = group["blocks_per_request"] * group["block_size"], ideal["encoder_tokens"]
        if group["kind"] == "cross" and tokens != need:
            text = f"cross-attention is reserved for {counted(tokens, 'encoder token')}"
            yield Reason(more=tokens > need, text=text)
            return


def _states_reserved(ideal: Row, other: Row) -> Iterator[Reason]:
    groups = [group for group in other["groups"] if group["kind"] == "linear"]
    if not groups:
        return
    blocks = max(group["blocks_per_request"] for group in groups)
    if blocks > 1:
        text = f"a request has {blocks} blocks of each state"
        yield Reason(more=True, text=text)
    need = sum(k["state_bytes"] for k in ideal["kinds"] if k["kind"] == "linear") // ideal["batch"]
    has = other["tp"] * sum(group["layers"] * group["page_bytes"] for group in groups)
    pages = {group["page_bytes"] for group in other["groups"] if group["kind"] != "linear"}
    padded = pages & {group["page_bytes"] for group in groups}
    if has > need and padded and other["tp"] == 1:
        text = f"states are padded to the attention layers' pages, {format_bytes(max(padded))} each"
        yield Reason(more=True, text=text)
    else:
        yield from _states_take(has, need)


def _latents(ideal: Row, other: Row) -> Iterator[Reason]:
    """A latent that is not kept as one, and index keys if the pages are as large as in fp8."""
    latents = [k for k in ideal["kinds"] if k["kind"] == "latent" and k["tokens"]]
    if latents and {group["kind"] for group in other["groups"]} == {"full"}:
        yield Reason(more=True, text="a latent is kept as K and V of every head")
    keys = [k for k in ideal["kinds"] if k["kind"] == "indexer" and k["tokens"]]
    token = sum(k["layers"] * _token_bytes(k, ideal) for k in latents)
    token += sum(k["layers"] * _fp8_key(k) for k in keys)
    for group in other["groups"] if keys else ():
        if _group_bytes(group, other) == group["block_size"] * token:
            more = sum(k["layers"] * (_fp8_key(k) - _token_bytes(k, ideal)) for k in keys)
            if more:
                text = "indexer keys are kept in fp8 with their scales"
                yield Reason(more=more > 0, text=text)


def _fp8_key(kind: Kind) -> int:
    """fp8 values and one fp32 scale for 128 of them: engines/vllm_models.py."""
    return int(kind["k_head_dim"] + kind["k_head_dim"] // 128 * 4)


def _token_bytes(kind: Kind, row: Row) -> int:
    """Bytes of one token of one of these layers."""
    own = kind["bytes"] - kind["state_bytes"]
    return int(own // (row["batch"] * kind["layers"] * kind["tokens"]))


def _group_bytes(group: Kind, row: Row) -> int:
    """One block of all the group's layers. A page is one layer's, or all of theirs where their
    sizes differ: then it is no smaller than the block, which one stage's layers share."""
    page = int(group["page_bytes"])
    return page if page >= row["bytes_per_block"] else page * int(group["layers"])


def _spread(ideal: Row, other: Row) -> Iterator[Reason]:
    """What comes of groups and ranks rather than of a layer."""
    smallest = min(_group_bytes(group, other) for group in other["groups"])
    blocks = other["batch"] * other["tp"] * other["blocks_per_request"]
    if smallest * blocks < other["total_bytes"]:
        count = len(other["groups"])
        text = f"{count} groups of layers share blocks as large as the largest group's"
        yield Reason(more=True, text=text)
    alone = other["tp"] // other["dcp"]
    if any(0 < kind["kv_heads"] < alone for kind in ideal["kinds"]):
        yield Reason(more=True, text="what several ranks keep copies of counts on each")
