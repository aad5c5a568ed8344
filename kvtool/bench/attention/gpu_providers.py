"""The GPU's own providers: our Triton kernels, and the libraries that serve models today."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

from kvtool.bench.attention.data import Data
from kvtool.bench.attention.prepared import Missing, Prepared
from kvtool.bench.device import load_torch

FLASHINFER_WORKSPACE = 128 * 2**20
"""Bytes: what FlashInfer's documentation sets aside."""
VLLM_GRID, VLLM_SEGMENTS = 128, 16
"""vLLM splits the context into 16 segments while sequences × KV heads stay below a grid of 128
(v1/attention/backends/triton_attn.py)."""


def paged(data: Data) -> Prepared:
    """Our paged kernel: block ids of many tiles at once, in registers."""
    return _paged(data, "chunked")


def paged_naive(data: Data) -> Prepared:
    """The same kernel with the obvious loop: each tile's block ids are loaded when it needs them."""
    return _paged(data, "naive")


def _paged(data: Data, walk: str) -> Prepared:
    from kvtool.kernels import decode

    plan = _plan(data, data.case.block_size, walk)
    outs, lses = _results(data)
    workspace = decode.workspace_for(data.q, plan)
    launches = [
        decode.prepare_paged(
            data.q, k_cache, v_cache, data.table, data.lengths, scale=data.scale,
            max_context=data.case.max_context, plan=plan, out=out, lse=lse, workspace=workspace,
        )
        for k_cache, v_cache, out, lse in zip(data.k_cache, data.v_cache, outs, lses, strict=True)
    ]  # fmt: skip
    return _prepared(data, launches, plan.num_splits, data.case.table_bytes)


def contiguous(data: Data) -> Prepared:
    """The same kernel on the contiguous cache, with a plan of its own."""
    from kvtool.kernels import decode

    plan = _plan(data, None, "chunked")
    outs, lses = _results(data)
    workspace = decode.workspace_for(data.q, plan)
    launches = [
        decode.prepare_contiguous(
            data.q, k, v, data.lengths, scale=data.scale, max_context=data.case.max_context,
            plan=plan, out=out, lse=lse, workspace=workspace,
        )
        for k, v, out, lse in zip(data.k, data.v, outs, lses, strict=True)
    ]  # fmt: skip
    return _prepared(data, launches, plan.num_splits, 0)


def _plan(data: Data, block_size: int | None, walk: str) -> Any:
    """The kernel's own plan for the case, with the splits and stages that the case asks for."""
    from kvtool.kernels.decode_plan import plan_for
    from kvtool.kernels.launch import chip_of

    case = data.case
    arch, sm_count = chip_of(data.q.device)
    plan = plan_for(
        head_dim=case.head_dim, item_bytes=data.q.element_size(), block_size=block_size,
        arch=arch, sm_count=sm_count, batch=case.batch, query_heads=case.query_heads,
        kv_heads=case.kv_heads, max_context=case.max_context, num_splits=case.num_splits, walk=walk,
    )  # fmt: skip
    return plan if case.num_stages is None else replace(plan, num_stages=case.num_stages)


def _prepared(data: Data, launches: list[Any], num_splits: int, extra_bytes: int) -> Prepared:
    """The launches of each pool, and what the compiler made of the attention kernel."""
    from kvtool.kernels.compiled import resources

    found = resources(launches[0].launches[0])
    return Prepared(
        run=lambda pool: launches[pool].run(),
        output=lambda pool: launches[pool].out,
        lse=lambda pool: launches[pool].lse,
        extra_bytes=extra_bytes + data.case.partial_bytes(num_splits),
        num_splits=num_splits,
        registers=found.registers,
        spills=found.spills,
        shared_bytes=found.shared_bytes,
    )


def flashinfer(data: Data) -> Prepared:
    """FlashInfer's paged decode, planned once; on tensor cores from 4 query heads a KV head on, as
    vLLM and SGLang choose."""
    torch = load_torch()
    library = _imported("flashinfer")
    case = data.case
    if min(case.lengths) == 0:
        raise Missing("it takes no empty sequences")
    indptr, indices, last = _csr(data)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=data.q.device),
        case.layout.upper(),
        use_cuda_graph=True,
        use_tensor_cores=case.query_heads // case.kv_heads >= 4,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
    )
    wrapper.plan(
        indptr, indices, last, case.query_heads, case.kv_heads, case.head_dim, case.block_size,
        q_data_type=data.q.dtype, kv_data_type=data.q.dtype, sm_scale=data.scale,
    )  # fmt: skip
    outs, _ = _results(data)
    pools = [
        tuple(one if case.layout == "nhd" else one.permute(0, 2, 1, 3) for one in pair)
        for pair in zip(data.k_cache, data.v_cache, strict=True)
    ]

    def run(pool: int) -> None:
        wrapper.run(data.q, pools[pool], out=outs[pool])

    return Prepared(run=run, output=lambda pool: outs[pool], extra_bytes=case.table_bytes)


def _csr(data: Data) -> tuple[Any, Any, Any]:
    """Block tables as FlashInfer takes them: row starts, all blocks in a row, tokens of each last."""
    torch = load_torch()
    case = data.case
    starts = [0]
    for count in case.blocks:
        starts.append(starts[-1] + count)
    rows = [data.table[row, :count] for row, count in enumerate(case.blocks)]
    last = [(tokens - 1) % case.block_size + 1 for tokens in case.lengths]
    indptr = torch.tensor(starts, dtype=torch.int32, device=data.q.device)
    return indptr, torch.cat(rows), torch.tensor(last, dtype=torch.int32, device=data.q.device)


def flash_attn(data: Data) -> Prepared:
    """flash-attn's flash_attn_with_kvcache on the paged cache: FlashAttention 3 where it is installed,
    which takes any block size, else 2."""
    if data.case.layout != "nhd":
        raise Missing("its paged cache is laid out nhd")
    attend = _flash_attn().flash_attn_with_kvcache
    named = inspect.signature(attend).parameters
    q = data.q.unsqueeze(1)
    table = {"page_table" if "page_table" in named else "block_table": data.table.clamp(min=0)}
    outputs: list[Any] = [None] * data.pools

    def run(pool: int) -> None:
        outputs[pool] = attend(
            q, data.k_cache[pool], data.v_cache[pool], cache_seqlens=data.lengths,
            softmax_scale=data.scale, causal=True, **table,
        )  # fmt: skip

    return Prepared(run=run, output=lambda pool: outputs[pool], extra_bytes=data.case.table_bytes)


def _flash_attn() -> Any:
    try:
        return importlib.import_module("flash_attn_interface")
    except ImportError:
        return _imported("flash_attn")


def vllm(data: Data) -> Prepared:
    """vLLM's Triton kernel, unified_attention, with its own split of the context where it has one."""
    torch = load_torch()
    attend = None
    for place in ("vllm.v1.attention.ops", "vllm.attention.ops"):
        try:
            module = importlib.import_module(f"{place}.triton_unified_attention")
        except ImportError:
            continue
        attend = module.unified_attention
        break
    if attend is None:
        raise Missing("it is not installed")
    case = data.case
    outs, _ = _results(data)
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=data.q.device)
    table = data.table.clamp(min=0)
    splits = _vllm_splits(data, attend)

    def run(pool: int) -> None:
        attend(
            q=data.q, k=data.k_cache[pool], v=data.v_cache[pool], out=outs[pool],
            cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=data.lengths,
            max_seqlen_k=case.max_context, softmax_scale=data.scale, causal=True,
            window_size=(-1, -1), block_table=table, softcap=0.0, q_descale=None,
            k_descale=None, v_descale=None, **splits,
        )  # fmt: skip

    return Prepared(run=run, output=lambda pool: outs[pool], extra_bytes=case.table_bytes)


def _vllm_splits(data: Data, attend: Any) -> dict[str, Any]:
    """The buffers of vLLM's split over the context, where this release takes them."""
    torch = load_torch()
    if "softmax_segm_output" not in inspect.signature(attend).parameters:
        return {}
    case = data.case
    rows = VLLM_GRID // case.kv_heads
    padded = 1 << (case.head_dim - 1).bit_length()
    shape = (max(rows, 1), case.query_heads, VLLM_SEGMENTS)
    return {
        "seq_threshold_3D": rows,
        "num_par_softmax_segments": VLLM_SEGMENTS,
        "softmax_segm_output": torch.empty((*shape, padded), device=data.q.device),
        "softmax_segm_max": torch.empty(shape, device=data.q.device),
        "softmax_segm_expsum": torch.empty(shape, device=data.q.device),
    }


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Missing("it is not installed") from error


def _results(data: Data) -> tuple[list[Any], list[Any]]:
    """An output and a log-sum-exp for each pool."""
    torch = load_torch()
    outs = [torch.zeros_like(data.q) for _ in range(data.pools)]
    lses = [
        torch.zeros(data.q.shape[:2], dtype=torch.float32, device=data.q.device)
        for _ in range(data.pools)
    ]
    return outs, lses
