"""The model behind a start-up log, and its bytes a token as the log's engine lays them out.

Used by scripts/accuracy_plan.py. A log names its model in words ("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ",
"DeepSeek-R1-Distill-Qwen-32B class"): a preset is looked for by that name, shorter and shorter. Where
there is none, the row's formula (layers × heads × head size) makes a small Llama-like config, so that the
numbers still go through kvtool's own reader, dtypes and split over ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtool import catalog
from kvtool.cache import CacheLayout, mha_token_bytes, stages, token_bytes
from kvtool.dtypes import DTYPES, KvDtype, parse_kv_dtype
from kvtool.engine_memory.defaults import version_of, vllm_batch
from kvtool.engines.vllm import VllmSettings, reserve
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.model.shape import LayerCache, ModelShape
from kvtool.units import GIB
from kvtool.weights.counting import parts_of

Row = dict[str, Any]
DISTILLED = {
    "qwen-14b": "qwen2.5-14b", "qwen-32b": "qwen2.5-32b", "qwen-7b": "qwen2.5-7b",
    "llama-70b": "llama-3.3-70b", "llama-8b": "llama-3.1-8b",
}  # fmt: skip
"""What DeepSeek-R1-Distill-… was trained from (its model card)."""
SIZE = re.compile(r"(?<![\w.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")
"""A number of parameters in a name: 7b, 8x7b, 0.6b."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A row's model in a row's engine."""

    name: str
    config: Mapping[str, Any]
    shape: ModelShape
    row: Row
    rule: str
    """How the log's engine counts tokens."""
    rate: float
    """Bytes a token and rank by that rule."""
    rates: tuple[float, ...]
    """By all rules that its engine has had."""

    @property
    def block(self) -> int:
        """Tokens; vLLM's default where the log does not say."""
        return int(self.row["block_size"] or (16 if self.row["engine"] == "vllm" else 1))

    def requests(self, tokens: int) -> list[float]:
        """Bytes of one request on a rank, in whole blocks, by each rule."""
        return [-(-tokens // self.block) * self.block * rate for rate in self.rates]

    def concurrency(self, held: int, tokens: int) -> tuple[float, float]:
        """Of requests of so many tokens: in whole blocks, and by tokens alone as old versions do."""
        return held / self.block / math.ceil(tokens / self.block), held / tokens


def of_row(row: Row) -> Found | None:
    """None: neither the name nor a formula says what was run."""
    known = config_of(row)
    if known is None:
        return None
    name, config = known
    shape = read_model(config, catalog.class_defaults()["types"])
    rates = rates_of(row, shape)
    low, high = row["implied_range"] or (0, math.inf)
    rule = next((one for one, rate in rates.items() if low <= rate <= high), next(iter(rates)))
    return Found(
        name=name, config=config, shape=shape, row=row, rule=rule, rate=rates[rule],
        rates=tuple(rates.values()),
    )  # fmt: skip


def config_of(row: Row) -> tuple[str, Mapping[str, Any]] | None:
    """A preset's, or what the formula describes."""
    preset = preset_of(row["model"])
    if preset is not None:
        return preset.name, preset.config
    config = from_formula(row)
    return None if config is None else (f"formula {row['formula']}", config)


def preset_of(text: str) -> catalog.ModelPreset | None:
    """By the longest beginning of the name that is a preset's, if no number of parameters is lost."""
    plain = re.sub(r"\(.*?\)| \+.*|,.*", "", text).strip().lower().replace(":", "-")
    plain = re.sub(r"^[\w.-]+/", "", plain).removeprefix("meta-")
    distilled = re.search(r"r1-distill-([a-z]+-[0-9.]+b)", plain)
    if distilled:
        name = DISTILLED.get(distilled[1])
        return catalog.model_preset(name) if name else None
    words = re.split(r"[- ]", plain)
    for count in range(len(words), 0, -1):
        preset = catalog.model_preset("-".join(words[:count]))
        if preset is not None and not SIZE.search(" ".join(words[count:])):
            return preset
    return None


# --- formulas -------------------------------------------------------------------------------------


def from_formula(row: Row) -> dict[str, Any] | None:
    """Of the forms that the rows have; None for another."""
    text = row["formula"] or ""
    for pattern, make in FORMS:
        match = re.match(pattern, text)
        if match:
            return make(row, match)
    return None


def _heads(row: Row, match: re.Match[str]) -> dict[str, Any]:
    """2 × layers × KV heads × head size × bytes: the heads are a rank's where the words say so."""
    layers = sum(int(one) for one in re.findall(r"\d+", match[1]))
    cut = row["tp"] if f"/tp {row['tp']}" in row["formula"] else 1
    return _llama(layers, int(match[2]) * cut, int(match[3]))


def _elements(row: Row, match: re.Match[str]) -> dict[str, Any] | None:
    """Elements of K and of V, all layers together (llama.cpp's and ggml's dtypes)."""
    keys, values = int(match[1]), int(match[2])
    return _llama(1, keys // 64, 64) if keys == values and not keys % 64 else None


def _latent(row: Row, match: re.Match[str]) -> dict[str, Any]:
    """Layers × (latent + rotary part) × bytes."""
    return {
        "model_type": "deepseek_v3", "num_hidden_layers": int(match[1]), "hidden_size": 1024,
        "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": int(match[2]),
        "qk_rope_head_dim": int(match[3] or 0), "qk_nope_head_dim": 64, "v_head_dim": 64,
        "vocab_size": 1024, "intermediate_size": 1024,
    }  # fmt: skip


def _llama(layers: int, heads: int, size: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "head_dim": size, "hidden_size": heads * size,
        "vocab_size": 32000, "intermediate_size": 4 * heads * size,
    }  # fmt: skip


FORMS = (
    (r"2\*(\d+|\(\d+\+\d+[^)]*\))\*(\d+)\*(\d+)\*[\d.]+(?:$| )", _heads),
    (r"(\d+)\*\w+ \+ (\d+)\*\w+$", _elements),
    (r"(\d+)\*\((\d+)\+(\d+)\)\*\d", _latent),
    (r"(\d+)\*(5\d\d)()\*\d", _latent),
)


# --- bytes a token --------------------------------------------------------------------------------


def rates_of(row: Row, shape: ModelShape) -> dict[str, float]:
    """Of one rank, by each rule that the log's engine may have had: which one, its version decides."""
    if row["engine"] == "vllm" or row["kv_dtype"] == "fp8_ds_mla":
        try:
            return dict(_pooled(row, shape))
        except KvtoolError as error:
            if error.code not in ("not_in_engine", "engine_not_understood"):
                raise
    return {"the sum of the layers": _summed(row, shape)}


def _summed(row: Row, shape: ModelShape) -> int:
    """All layers at full length; of llama.cpp's two pools the one that the row names."""
    kv, tp = kv_of(row["kv_dtype"]), row["tp"]
    layout = CacheLayout(shape=shape, dtype=DTYPES["bf16"], kv=kv, tp=tp)
    words = row["model"].lower()
    fullest = max(stages(shape.num_modules, row["pp"]), key=len)
    own = [e for e in shape.layers if e.kind not in ("linear", "cross") and e.module in fullest]
    if "mla off" in words:
        return sum(mha_token_bytes(layout, one) for one in own)
    windows = [one for one in own if one.window is not None]
    if windows and ("swa layers" in words or "global" in words):
        own = windows if "swa layers" in words else [one for one in own if one not in windows]
    total = sum(_layer(layout, one) for one in [*own, *_drafted(words, own)])
    if "mla 1" in words:  # ik_llama.cpp: the latent once more, transposed, as V
        return total + sum(kv.v.vector_bytes(e.k_head_dim) for e in own if e.kind == "latent")
    return total


def _layer(layout: CacheLayout, entry: LayerCache) -> int:
    """llama.cpp keeps a latent and its rotary part together as K."""
    if entry.kind == "latent":
        return layout.kv.k.vector_bytes(entry.k_head_dim + entry.v_head_dim)
    return token_bytes(layout, entry, tp=layout.tp)


def _pooled(row: Row, shape: ModelShape) -> Iterator[tuple[str, float]]:
    """vLLM printed a pool's blocks over its groups, and does concurrency × maximum length since."""
    kv = row["kv_dtype"] if row["kv_dtype"] == "fp8_ds_mla" else kv_of(row["kv_dtype"]).k.name
    layout = CacheLayout(shape=shape, dtype=DTYPES["bf16"], kv=kv_of("bf16"), tp=row["tp"])
    own = [one for one in shape.layers if one.kind in ("full", "sliding", "latent")]
    drafts = _drafted(row["model"].lower(), own)
    more = sum(token_bytes(layout, one, tp=row["tp"]) for one in drafts)
    longest = row["max_model_len"] or shape.max_context or 8192
    pools = [
        reserve(shape, VllmSettings(
            max_model_len=longest, tp=row["tp"], pp=row["pp"],
            kv_dtype="auto" if kv == "bf16" else kv, batches_in_flight=batches,
            hybrid=not any(one.kind == "chunked" for one in shape.layers),
            mamba_block_size=longest,
        ))
        for batches in (1, 2)
    ]  # fmt: skip
    first = pools[0]
    if first.bytes_per_block is None:
        raise KvtoolError(first.reason, "", code="not_in_engine")
    block = min(group.block_size for group in first.groups)
    yield "blocks over groups", first.bytes_per_block * len(first.groups) / block + more
    for batches, pool in enumerate(pools, 1):
        if pool.one_request_bytes is not None:
            rule = f"concurrency × length, {batches} in flight"
            yield rule, pool.one_request_bytes / longest + more


def _drafted(words: str, own: list[LayerCache]) -> Iterator[LayerCache]:
    """EAGLE's head is one layer like the model's last."""
    if "eagle" in words and own:
        yield own[-1]


def kv_of(text: str) -> KvDtype:
    """The dtypes as logs write them: f16/bf16 and fp8/int8 are either, q8_0/f16 K and V apart."""
    known = {"f16/bf16": "bf16", "fp8/int8": "fp8", "fp8_ds_mla": "fp8"}
    return parse_kv_dtype(known.get(text, text), auto=DTYPES["bf16"])


# --- pools of a GPU -------------------------------------------------------------------------------

NAMES = ("gh200", "h200", "h100", "h20", "a100 80gb", "a100 40gb", "a10g", "l4", "rtx 4090", "rtx 3090",
         "rtx 5090", "b200", "b300", "v100 32gb", "t4", "mi300x", "rtx a6000", "l40s")  # fmt: skip
WEIGHTS = ("weights_GiB", "weights_GB", "weights_GiB_per_rank", "weights_GB_per_rank")
QUANTISED = ("awq", "gptq", "int4", "4bit", "4-bit", "fp8", "w8a8", "gguf", "q4", "nvfp4", "+")
POOL = ("kv_GiB", "available_kv_GiB")


def pool_row(row: Row, found: Found) -> Row | None:
    """A row as tests/data/engine_memory_pools.jsonl has them; None where the log says too little."""
    words = (row["gpu"] or "").lower()
    named = next((one for one in NAMES if one in words), None)
    printed = row["printed"]
    if row["engine"] != "vllm" or named is None or row["gpu_memory_utilization"] is None:
        return None
    size = next((printed[name] for name in POOL if name in printed), None)
    if size is None and printed.get("gpu_blocks", -1) > 0:
        size = printed["gpu_blocks"] * (row["block_size"] or 16) * found.rate / GIB
    weights = _weights(row, found)
    if size is None or weights is None:
        return None
    batch, old = vllm_batch(catalog.gpu_preset(named)), "cpu_blocks" in printed
    version = row["engine_version"] or ("0.6" if old else None)
    longest = row["max_model_len"] or found.shape.max_context or 2048
    told = {} if "total_GiB" not in printed else {"total_gib": printed["total_GiB"]}
    return told | {
        "id": row["id"], "model": found.name, "config": found.config, "gpu": named,
        "tp": row["tp"], "pp": row["pp"], "util": row["gpu_memory_utilization"],
        "tokens": max(2048, longest) if old else batch.tokens,
        "sequences": 256 if old else batch.sequences, "weights_gib": weights, "kv_gib": size,
        **({"version": version} if version_of(version) else {}),
    }  # fmt: skip


def _weights(row: Row, found: Found) -> float | None:
    """GiB of a rank: printed, or counted in 16 bit where nothing says that they are quantised."""
    printed = row["printed"]
    for name in WEIGHTS:
        if name in printed:
            return float(printed[name])
    if found.name.startswith("formula") or any(one in row["model"].lower() for one in QUANTISED):
        return None
    parts = parts_of(found.name, found.config, found.shape)
    return float(sum(part.rank_count(row["tp"]) for part in parts)) * 2 / row["pp"] / GIB
