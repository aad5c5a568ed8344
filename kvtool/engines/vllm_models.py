"""A model's layers as vLLM 0.32 (V1) builds them: heads of one rank, windows, states, block size.

Where vLLM's view of a model differs from the mathematics, the difference is a row of `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Literal

from kvtool.cache import check_parallel, rank_elements, shard
from kvtool.dtypes import DTYPES, MODEL_DTYPES, Dtype, dtype_named
from kvtool.engines.vllm_specs import (
    BLOCK_SIZE,
    DS_MLA_BYTES,
    LayerSpec,
    SpecKind,
    VllmSettings,
)
from kvtool.errors import KvtoolError
from kvtool.model.shape import LayerCache, ModelShape, State

StateDtype = Literal["model", "stated", "fp32", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFamily:
    """What vLLM makes of a model type otherwise than ModelShape says."""

    state: StateDtype = ""
    """The recurrent state's dtype: the model's, the config's, or always fp32; '' if none is known.
    Convolutions are kept in the model's dtype."""
    checkpoints: int = 0
    """Blocks beside the two of a state with prefix caching: 1 for Mamba-2 mixers, which save the
    state at a prefill's last block edge (num_prefill_checkpoint_blocks)."""
    window_more: int = 0
    """Tokens added to the config's window."""
    attention_first: bool = False
    """True where attention layers are named ahead of the mixers, which orders the groups."""
    expanded: bool = False
    """True where vLLM runs latent attention as multi-head attention, V padded to K's width."""
    cross: bool = False
    """True for encoder-decoders that V1 runs."""
    refused: str = ""


def _row(types: str, **how: object) -> dict[str, VllmFamily]:
    family = VllmFamily(**how)  # type: ignore[arg-type]
    return dict.fromkeys(types.split(), family)


FAMILIES: dict[str, VllmFamily] = {
    # models/mamba.py, models/jamba.py: mamba_ssm_cache_dtype 'auto' is the model's dtype
    **_row("mamba falcon_mamba jamba", state="model"),
    # layers/mamba/mamba_mixer2.py
    **_row("mamba2 bamba granitemoehybrid falcon_h1", state="model", checkpoints=1),
    # models/zamba2.py: the shared attention blocks are `model.attn.0 …`
    **_row("zamba2", state="model", checkpoints=1, attention_first=True),
    # models/config.py, NemotronHForCausalLMConfig: the config's mamba_ssm_cache_dtype, or fp32
    **_row("nemotron_h", state="stated", checkpoints=1),
    # layers/mamba/mamba_utils.py, gated_delta_net_state_dtype
    **_row("qwen3_next olmo_hybrid", state="model"),
    # models/config.py, Qwen3_5ForConditionalGenerationConfig: the config's mamba_ssm_dtype
    **_row("qwen3_5_text qwen3_5_moe_text", state="stated"),
    # layers/mamba/mamba_utils.py, kda_state_dtype: always fp32
    **_row("kimi_linear", state="fp32"),
    # layers/mamba/mamba_utils.py, linear_attention_state_dtype and short_conv_state_dtype
    **_row("minimax minimax_m1 minimax_text_01 lfm2 lfm2_moe", state="model"),
    # models/commandr.py: the window's edge counts (4097 for a sliding_window of 4096)
    **_row("cohere2 cohere2_moe", window_more=1),
    # models/minicpm3.py is not among the MLA types of model_arch_config_convertor.py
    **_row("minicpm3", expanded=True),
    **_row("whisper", cross=True),
    **_row("openai-gpt", refused="a class without a cache"),
    # v1/core/kv_cache_utils.py, _get_packed_kv_cache_groups: pages of several sizes in one block
    **_row("deepseek_v4 deepseek_ref", refused="its packed blocks of compressed caches"),
}  # fmt: skip

PLAIN = VllmFamily()
MEASURED = frozenset({
    "cohere", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "falcon_h1",
    "gemma2", "gemma3_text", "glm4_moe", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_oss", "gptj",
    "granitemoehybrid", "jamba", "kimi_k2", "lfm2", "llama", "mamba2", "mimo_v2_flash",
    "minimax_m2", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo3", "opt", "phi3", "phimoe",
    "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text",
    "starcoder2", "zamba2",
})  # fmt: skip
"""Model types whose pools were compared with vLLM's own (docs/accuracy.md)."""
INDEXER_BLOCK = 64
"""v1/attention/backends/mla/indexer.py: the indexer's kernels take blocks of 64 tokens."""
KERNEL_BLOCK = 16
"""Blocks of the attention kernels come in multiples of 16 tokens."""
LATENT_HYBRID_BLOCK = 128
"""platforms/interface.py, _align_hybrid_block_size: the least step beside a latent."""
INDEXER_SCALE = 128
"""The indexer's keys are fp8 with one fp32 scale for 128 values (layers/sparse_attn_indexer.py)."""


def specs_of(shape: ModelShape, settings: VllmSettings) -> tuple[LayerSpec, ...]:
    """The specs of every layer of one tensor-parallel rank, in the order that vLLM meets them."""
    family = FAMILIES.get(shape.model_type, PLAIN)
    check_parallel(shape, settings.tp, settings.pp, dcp=settings.dcp)
    if settings.kv_dtype == "fp8_ds_mla" and not any(e.kind == "latent" for e in shape.layers):
        raise KvtoolError(
            f"fp8_ds_mla is a layout of latents, and {shape.model_type} has none",
            "choose --kv-dtype fp8",
            code="not_in_engine",
        )
    drafts = [_spec(shape, entry, settings) for entry in shape.layers]
    if family.attention_first:
        drafts.sort(key=lambda spec: spec.kind == "linear")
    return tuple(align(drafts, settings))


def refuse(shape: ModelShape, what: str) -> KvtoolError:
    """The error for a layout of vLLM that is not modelled."""
    return KvtoolError(
        f"--engine vllm: {shape.model_type}: {what}: not modelled",
        "take --engine ideal, or give vLLM's own specs to kvtool size --layer-specs FILE",
        code="engine_not_understood",
    )


def _spec(shape: ModelShape, entry: LayerCache, settings: VllmSettings) -> LayerSpec:
    shape = replace(shape, model_type=shape.type_of(entry)) if entry.owner else shape
    family = FAMILIES.get(shape.model_type, PLAIN)
    if family.refused:
        raise refuse(shape, family.refused)
    if entry.kind == "linear":
        return _state_spec(shape, family, entry, settings)
    odd = entry.states or entry.stride != 1 or entry.fixed_bytes or entry.extra or entry.reference
    if odd or entry.kind == "compressed" or entry.kind == "hidden":
        raise refuse(shape, f"its {entry.kind} layers")
    if entry.kind == "cross" and not family.cross:
        raise refuse(shape, "its cross-attention, which V1 has for Whisper only")
    if entry.kind == "indexer":
        return _indexer_spec(shape, entry)
    if entry.kind == "latent" and not family.expanded:
        return _latent_spec(shape, entry, settings)
    if entry.kind == "latent":
        return _attention_spec("full", family, entry, settings)
    return _attention_spec(entry.kind, family, entry, settings)


def _attention_spec(
    kind: SpecKind, family: VllmFamily, entry: LayerCache, settings: VllmSettings
) -> LayerSpec:
    """kv_heads × (head_size + head_size_v): AttentionSpec of v1/kv_cache_interface.py."""
    dtype = kv_dtype(settings)
    heads, k_dim, v_dim = entry.kv_heads, entry.k_head_dim, entry.v_head_dim
    if entry.kind == "latent":  # expanded
        heads, k_dim, v_dim = entry.query_heads, entry.mha_k_dim, entry.mha_k_dim
    heads = shard(heads, settings.tp)
    window = entry.window + family.window_more if entry.window else None
    return LayerSpec(
        kind=kind,
        block_size=0,
        token_bytes=heads * (dtype.vector_bytes(k_dim) + dtype.vector_bytes(v_dim)),
        form=(heads, k_dim, v_dim),
        window=window if entry.kind == "sliding" else None,
        chunk=entry.window if entry.kind == "chunked" else None,
        layer=entry.module,
    )


def _latent_spec(shape: ModelShape, entry: LayerCache, settings: VllmSettings) -> LayerSpec:
    """One head of kv_lora_rank + qk_rope_head_dim on every rank: MLAAttentionSpec."""
    if entry.window is not None:
        raise refuse(shape, "its latent layers with a window")
    width = entry.k_head_dim + entry.v_head_dim
    bytes_ = kv_dtype(settings).vector_bytes(width)
    if settings.kv_dtype == "fp8_ds_mla":
        if (entry.k_head_dim, entry.v_head_dim) != (512, 64):
            raise refuse(shape, f"fp8_ds_mla for a latent of {width} values, not 512 + 64")
        bytes_ = DS_MLA_BYTES
    return LayerSpec(
        kind="latent", block_size=0, token_bytes=bytes_, form=(1, width, 0), layer=entry.module
    )


def _indexer_spec(shape: ModelShape, entry: LayerCache) -> LayerSpec:
    """fp8 keys and their fp32 scales as bytes, whatever the KV dtype (models/deepseek_v2.py)."""
    if not any(other.kind == "latent" for other in shape.layers):
        raise refuse(shape, "its index keys beside ordinary attention")
    width = entry.k_head_dim + entry.k_head_dim // INDEXER_SCALE * 4
    return LayerSpec(
        kind="latent", block_size=0, token_bytes=width, form=("indexer", width), layer=entry.module
    )


def _state_spec(
    shape: ModelShape, family: VllmFamily, entry: LayerCache, settings: VllmSettings
) -> LayerSpec:
    """The sum of a layer's state tensors on one rank: MambaSpec."""
    if not family.state:
        raise refuse(shape, "its constant states")
    sizes = [_state_bytes(state, family, settings) for state in entry.states]
    return LayerSpec(
        kind="linear",
        block_size=0,
        state_bytes=sum(sizes),
        form=tuple(sizes),
        state_blocks=(2 + family.checkpoints if settings.prefix_caching else 1)
        + settings.speculative_tokens,
        layer=entry.module,
    )


def _state_bytes(state: State, family: VllmFamily, settings: VllmSettings) -> int:
    name = settings.dtype
    if state.name == "ssm" and family.state == "fp32":
        name = "fp32"
    elif state.name == "ssm" and family.state == "stated":
        name = settings.dtype if state.dtype == "model" else state.dtype
    return rank_elements(state, settings.tp) * dtype_named(name, flag="the state's dtype").bits // 8


KV_DTYPES = ("fp16", "bf16", "fp8", "fp8_e5m2")
"""Of vLLM's --kv-cache-dtype, those whose bytes follow from the element's size alone."""


def kv_dtype(settings: VllmSettings) -> Dtype:
    """The dtype of K and V; fp8_ds_mla is fp8 wherever it is not a latent."""
    name = settings.kv_dtype.strip().lower()
    if name == "auto":
        return dtype_named(settings.dtype, flag="--dtype", among=MODEL_DTYPES)
    if name == "fp8_ds_mla":
        return DTYPES["fp8"]  # of what is no latent beside one
    if "/" in name:
        raise KvtoolError(
            "--engine vllm stores K and V in one dtype", "give one --kv-dtype", code="not_in_engine"
        )
    if name not in KV_DTYPES:
        raise KvtoolError(
            f"--engine vllm has no KV dtype {name} that kvtool knows the layout of",
            f"choose among auto, {', '.join(KV_DTYPES)}, or fp8_ds_mla alone",
            code="not_in_engine",
        )
    return dtype_named(name, flag="--kv-dtype")


# --- block size -----------------------------------------------------------------------------------


def align(drafts: list[LayerSpec], settings: VllmSettings) -> list[LayerSpec]:
    """Give every layer its block size, and pad states to the attention's page.

    platforms/interface.py, _align_hybrid_block_size: the block grows until an attention page holds a
    state; a model without attention has nothing to align.
    """
    asked = settings.block_size or BLOCK_SIZE
    attention = [spec for spec in drafts if spec.kind != "linear"]
    states = [spec for spec in drafts if spec.kind == "linear"]
    indexed = any(spec.form[0] == "indexer" for spec in attention)
    step = lcm(KERNEL_BLOCK, INDEXER_BLOCK) if indexed else KERNEL_BLOCK
    block = asked
    page = 0
    if attention and states:
        token = next(spec.token_bytes for spec in attention if spec.form[0] != "indexer")
        block = _holding(states[0].state_bytes, token, asked, step=_step(attention, asked))
        block = -(-block // step) * step
        page = block * token
    elif attention:
        block = -(-asked // step) * step
    mamba_block = settings.mamba_block_size or (
        block if settings.prefix_caching else settings.max_model_len
    )
    return [
        replace(spec, block_size=mamba_block, padded=page or None)
        if spec.kind == "linear"
        else replace(spec, block_size=block)
        for spec in drafts
    ]


def _step(attention: list[LayerSpec], asked: int) -> int:
    latent = any(spec.kind == "latent" for spec in attention)
    return max(KERNEL_BLOCK, asked, LATENT_HYBRID_BLOCK if latent else 0)


def _holding(state: int, token: int, asked: int, *, step: int) -> int:
    """The least multiple of the step whose page holds the state, and at least what was asked."""
    return max(asked, step * -(-state // (step * token)))
