"""The row of the engine `vllm`: what it reserves for one request, and the pool that it lays out."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvtool.engines.vllm import MEASURED, LayerSpec, VllmPool, VllmSettings, pool_of, reserve
from kvtool.errors import KvtoolError
from kvtool.model.shape import ModelShape
from kvtool.run import Row
from kvtool.size_row import Case, Subject, VllmOptions, gqa_ratio, inputs, plain_bytes

STATE_BLOCK_TOKENS = 8192
"""Tokens that a state's block stands for, at most: nominal, for no byte depends on it."""


def settings_of(case: Case, options: VllmOptions, *, chunked: bool) -> VllmSettings:
    """The settings that vLLM would be started with. One request is as long as the context unless
    --max-model-len says otherwise.

    The hybrid KV cache manager is off for chunked attention unless
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE is set (config/vllm.py).
    """
    shape, layout = case.layout.shape, case.layout
    default_batches = layout.pp if layout.pp > 1 else 2
    kv_dtype = options.kv_dtype(layout)
    return VllmSettings(
        max_model_len=options.max_model_len or case.context,
        tp=layout.tp,
        pp=layout.pp,
        pp_layers=layout.pp_layers,
        dcp=layout.dcp,
        dtype=layout.dtype.name,
        kv_dtype="auto" if kv_dtype == layout.dtype.name else kv_dtype,
        block_size=layout.block_size,
        max_batched_tokens=options.max_batched_tokens,
        batches_in_flight=options.batches_in_flight or default_batches,
        speculative_tokens=shape.mtp,
        prefix_caching=options.prefix_caching,
        hybrid=not chunked if options.hybrid is None else options.hybrid,
        mamba_block_size=None if options.prefix_caching else _state_block(shape),
        kv_memory=options.kv_memory,
    )


def _state_block(shape: ModelShape) -> int:
    top = shape.max_context
    return STATE_BLOCK_TOKENS if top is None else min(STATE_BLOCK_TOKENS, top)


def reserve_row(subject: Subject, case: Case, options: VllmOptions) -> Row:
    """What vLLM reserves for a request of this model."""
    longest = options.max_model_len
    if longest is not None and case.context > longest:
        raise KvtoolError(
            f"a context of {case.context:,} tokens is above --max-model-len {longest:,}",
            "shorten --context, or raise --max-model-len",
            code="context_too_long",
        )
    shape = case.layout.shape
    settings = settings_of(case, options, chunked=any(e.kind == "chunked" for e in shape.layers))
    pool = reserve(shape, settings)
    row = inputs(subject, case) | _lengths(settings) | pool_fields(pool, case)
    row["kv_dtype"] = options.kv_dtype(case.layout)
    if case.encoder:
        row["encoder_tokens"] = settings.encoder_tokens
    row |= {
        "gqa_ratio": gqa_ratio(shape),
        "plain_bytes": case.batch * plain_bytes(case.layout, case.context),
        "layers": shape.num_layers,
    }
    if shape.assumed:
        row["assume"] = shape.assumed
    return row


def notes_of(row: Row, case: Case, options: VllmOptions) -> list[str]:
    """What vLLM decides by itself, or is assumed of it."""
    asked, real = case.layout.block_size, row["block_size"]
    kinds = {group["kind"] for group in row["groups"]}
    kind = case.layout.shape.model_type
    notes = []
    if kind not in MEASURED:
        notes.append(
            f"no pool of {kind} was compared with vLLM's own: its general rules are applied"
        )
    if asked is not None and asked != real:
        notes.append(f"vLLM makes blocks of {real:,} tokens of --block-size {asked:,}")
    if options.hybrid is None and not row["hybrid"]:
        notes.append(
            "vLLM turns its hybrid KV cache manager off for chunked attention: every layer keeps"
            " every token (--hybrid turns it on)"
        )
    if kinds & {"sliding", "chunked", "cross"}:
        notes.append(
            f"{row['max_batched_tokens']:,} tokens a step are assumed (--max-batched-tokens);"
            " vLLM's own default depends on the GPU"
        )
    if "linear" in kinds and case.layout.shape.draft:
        notes.append("state blocks for drafted tokens are not counted")
    return notes


def specs_row(name: str, specs: tuple[LayerSpec, ...], case: Case, options: VllmOptions) -> Row:
    """The same for a mix of layer specs (--layer-specs) in place of a model."""
    settings = settings_of(case, options, chunked=False)  # specs are what vLLM has decided on
    pool = pool_of(specs, settings)
    subject = Subject(name=name, source="file", shape=case.layout.shape)
    row = inputs(subject, case) | _lengths(settings) | pool_fields(pool, case)
    return row | {"gqa_ratio": None, "plain_bytes": 0, "layers": len(specs)}


def _lengths(settings: VllmSettings) -> Row:
    return {
        "max_model_len": settings.max_model_len,
        "max_batched_tokens": settings.max_batched_tokens,
        "batches_in_flight": settings.batches_in_flight,
        "prefix_caching": settings.prefix_caching,
        "hybrid": settings.hybrid,
        "kv_memory_bytes": settings.kv_memory,
    }


def pool_fields(pool: VllmPool, case: Case) -> Row:
    """The pool's numbers. Bytes of a block and of a request are one GPU's; totals are all GPUs'."""
    request, stages = pool.one_request_bytes, pool.all_stages_bytes
    tp = case.layout.tp
    sequence = None if stages is None else stages * tp
    per_gpu = None if request is None else -(-case.batch // case.dp) * request
    return {
        "block_size": pool.block_size,
        "bytes_per_token": None if pool.bytes_per_token is None else pool.bytes_per_token * tp,
        "sequence_bytes": sequence,
        "state_bytes": None,
        "cross_bytes": None,
        "scale_bytes": 0,
        "total_bytes": None if sequence is None else case.batch * sequence,
        "per_gpu_bytes": per_gpu,
        "mha_bytes": None,
        "bytes_per_block": pool.bytes_per_block,
        "blocks_per_request": pool.blocks_per_request,
        "one_request_bytes": request,
        "num_blocks": pool.num_blocks,
        "kv_cache_size_tokens": pool.kv_cache_size_tokens,
        "max_concurrency": pool.max_concurrency,
        "fits": pool.fits,
        "reason": pool.reason,
        "groups": [asdict(group) for group in pool.groups],
        "kinds": [_kind(group, pool, case.batch * tp) for group in map(asdict, pool.groups)],
    }


def _kind(group: dict[str, Any], pool: VllmPool, times: int) -> dict[str, Any]:
    """A group as an entry of `kinds`; with pipeline stages a block counts on each of them."""
    blocks = group["blocks_per_request"]
    size = (pool.all_stages_bytes or 0) // (pool.blocks_per_request or 1)
    state = group["kind"] == "linear"
    several = "the largest group's pages: every group draws from one pool"
    return {
        "kind": group["kind"],
        "layers": group["layers"],
        "kv_heads": None,
        "k_head_dim": None,
        "v_head_dim": None,
        "window": group["window"],
        "stride": 1,
        "tokens": 0 if state else blocks * group["block_size"],
        "bytes": times * blocks * size,
        "state_bytes": 0,
        "formula": f"{blocks:,} blocks × {size:,} bytes"
        + (f" × {times:,} (sequences × tp)" if times > 1 else ""),
        "decided_by": {
            "blocks": f"{blocks:,} a request, "
            + ("a state each" if state else f"{group['block_size']:,} tokens each"),
            "bytes_per_block": several if len(pool.groups) > 1 else "a page of each layer",
        },
    }
