"""The plain references against torch's own attention, so that the oracle is not its own judge."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

from kvtool.kernels import decode, merge, store  # noqa: E402


def dense(batch: int = 3, tokens: int = 21, heads: int = 2, head_dim: int = 64) -> tuple:
    """q with 3 query heads a KV head, k and v, in float64."""
    torch.manual_seed(0)
    q = torch.randn(batch, 3 * heads, head_dim, dtype=torch.float64)
    k, v = torch.randn(2, batch, tokens, heads, head_dim, dtype=torch.float64)
    return q, k, v


@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_the_contiguous_reference_is_torchs_attention(window: int) -> None:
    q, k, v = dense()
    lengths = torch.tensor([21, 7, 0], dtype=torch.int32)
    out, lse = decode.contiguous_reference(q, k, v, lengths, window=window, scale=0.2)
    assert out.dtype == lse.dtype == torch.float64
    for seq, length in enumerate(lengths.tolist()):
        if not length:
            assert (out[seq] == 0).all()
            assert (lse[seq] == -torch.inf).all()
            continue
        start = max(0, length - window) if window else 0
        keys, values = (part[seq, start:length].transpose(0, 1) for part in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q[seq][:, None], keys, values, scale=0.2, enable_gqa=True
        )
        torch.testing.assert_close(out[seq], wanted[:, 0])
        scores = (q[seq].view(2, 3, 1, 64) * keys[:, None]).sum(-1) * 0.2
        torch.testing.assert_close(lse[seq], scores.exp().sum(-1).log().flatten())


def test_the_paged_reference_follows_the_table_that_store_filled() -> None:
    q, k, v = dense()
    lengths = torch.tensor([21, 0, 13], dtype=torch.int32)
    table = torch.tensor([[7, 1, 4], [-1, -1, -1], [0, 5, 2**30]], dtype=torch.int32)
    caches = torch.full((2, 8, 8, 2, 64), torch.nan, dtype=torch.float64)
    for seq, length in enumerate(lengths.tolist()):
        tokens = torch.arange(length)
        slots = table[seq, tokens // 8].long() * 8 + tokens % 8
        store.reference(k[seq, :length], v[seq, :length], *caches, slots)
    for window in (0, 6):
        paged = decode.paged_reference(q, *caches, table, lengths, window=window)
        wanted = decode.contiguous_reference(q, k, v, lengths, window=window)
        torch.testing.assert_close(paged, wanted)


def test_merged_parts_are_attention_over_all_of_them() -> None:
    q, k, v = dense()
    lengths = torch.full((3,), 21, dtype=torch.int32)
    first = decode.contiguous_reference(q, k[:, :8], v[:, :8], lengths.clamp(max=8))
    second = decode.contiguous_reference(q, k[:, 8:], v[:, 8:], lengths - 8)
    merged = merge.reference(*(torch.stack(pair) for pair in zip(first, second, strict=True)))
    torch.testing.assert_close(merged, decode.contiguous_reference(q, k, v, lengths))
