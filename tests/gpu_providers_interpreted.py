"""The GPU's providers on the CPU: our kernels in Triton's interpreter, the libraries as stand-ins.

Run by tests/test_bench_providers.py with TRITON_INTERPRET=1, in a process of its own: an address out
of bounds ends it. The stand-ins compute what the libraries document, from the same arguments, so that
what is checked is how a case is handed over: starts, block ids, lengths, strides, scale.
"""

from __future__ import annotations

import sys
import types
from itertools import pairwise
from typing import Any

import torch
from bench_cases import CPU, case

from kvtool.bench.attention import data as cases
from kvtool.bench.attention import gpu_providers as gpu
from kvtool.bench.attention.correct import expected, verdict
from kvtool.kernels.decode import paged_reference


def _reference(q: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, scale: float) -> Any:
    return paged_reference(q, k_cache, v_cache, table, lengths, scale=scale)[0].to(q.dtype)


class Wrapper:
    """FlashInfer's wrapper, with its documented parameters: row starts, block ids and tokens of each
    last block (docs.flashinfer.ai/api/attention.html)."""

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        use_tensor_cores: bool = False, paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None, paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto", jit_args: Any = None,
    ) -> None:  # fmt: skip
        self.layout = kv_layout
        assert use_cuda_graph
        assert paged_kv_last_page_len_buffer.dtype == torch.int32
        self.room = len(paged_kv_indices_buffer), len(paged_kv_indptr_buffer)

    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, pos_encoding_mode: str = "NONE", window_left: int = -1,
        logits_soft_cap: float | None = None, q_data_type: Any = "float16",
        kv_data_type: Any = None, data_type: Any = None, sm_scale: float | None = None,
    ) -> None:  # fmt: skip
        assert (len(indices), len(indptr)) == self.room
        self.heads = num_qo_heads, num_kv_heads, head_dim
        counts = indptr.diff()
        assert int(last_page_len.min()) >= 1
        self.lengths = ((counts - 1) * page_size + last_page_len).int()
        self.table = torch.zeros((len(counts), int(counts.max())), dtype=torch.int32)
        for row, (start, stop) in enumerate(pairwise(indptr)):
            self.table[row, : stop - start] = indices[start:stop]
        self.scale, self.dtype = sm_scale, q_data_type

    def run(
        self, q: Any, paged_kv_cache: Any, *, out: Any = None, lse: Any = None,
        return_lse: bool = False,
    ) -> Any:  # fmt: skip
        views = [one if self.layout == "NHD" else one.permute(0, 2, 1, 3) for one in paged_kv_cache]
        assert (q.shape[1], views[0].shape[2], q.shape[2]) == self.heads
        assert q.dtype == self.dtype
        out.copy_(_reference(q, *views, self.table, self.lengths, self.scale))
        return out


def flash_attn_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, block_table: Any,
    softmax_scale: float, causal: bool,
) -> Any:  # fmt: skip
    """flash-attn: one query a sequence on the second axis."""
    return _reference(
        q.squeeze(1), k_cache, v_cache, block_table, cache_seqlens, softmax_scale
    ).unsqueeze(1)


def unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any, block_table: Any,
    softcap: float, q_descale: Any, k_descale: Any, v_descale: Any, seq_threshold_3D: int = 0,
    num_par_softmax_segments: int = 0, softmax_segm_output: Any = None,
    softmax_segm_max: Any = None, softmax_segm_expsum: Any = None,
) -> None:  # fmt: skip
    """vLLM: one query a sequence, one after the other."""
    assert cu_seqlens_q.tolist() == list(range(len(seqused_k) + 1))
    assert max_seqlen_k == int(seqused_k.max())
    out.copy_(_reference(q, k, v, block_table, seqused_k, softmax_scale))


def stand_in(name: str, **members: Any) -> None:
    """A library of that name."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def main() -> None:
    """Every provider on a few cases; a line for each that was right."""
    stand_in("flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    stand_in("flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    stand_in("vllm.v1.attention.ops.triton_unified_attention", unified_attention=unified_attention)
    for changes in (
        {},
        {"layout": "nhd", "kv_dtype": "bf16", "pattern": "shuffled", "num_splits": 3},
        {"layout": "nhd", "batch": 3, "skew": 2, "block_size": 4, "pattern": "fragmented"},
        {"kv_dtype": "fp16", "block_size": 64, "num_stages": 2},
    ):
        one = case(**changes)
        data = cases.make(one, CPU, seed=0)
        answer = expected(data)
        for name in ("paged", "paged_naive", "contiguous", "flashinfer", "flash_attn", "vllm"):
            data.fill_padding(0.0 if name in ("flashinfer", "flash_attn", "vllm") else float("nan"))
            try:
                ready = getattr(gpu, name)(data)
            except gpu.Missing as why:
                print(name, "missing:", why)
                continue
            found = verdict(data, ready, answer)
            assert found.correct, (name, changes, found)
            if one.num_splits and name in ("paged", "contiguous"):
                assert ready.num_splits == 3
                assert ready.extra_bytes >= one.partial_bytes(3) > 0
            print(name, "right", found.max_abs_error)


main()
