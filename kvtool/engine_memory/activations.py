"""The peak of a forward pass, by arithmetic: what is alive at once at its widest point."""

from __future__ import annotations

from kvtool.engine_memory.sizes import ModelSizes

FP32 = 4


def layers(sizes: ModelSizes, *, tokens: int, tp: int, dtype_bytes: int) -> int:
    """A layer's widest moment: four hidden states, and an MLP or attention's columns of this rank.

    Hidden state, residual, normed input and the sublayer's output are whole on every rank. An MLP
    holds what comes of its first matrices and the activation of that; attention queries, keys,
    values and its output.
    """
    mlp = sizes.dense_up + sizes.dense_width
    attention = 2 * sizes.query_width + sizes.kv_width
    return tokens * dtype_bytes * (4 * sizes.hidden + -(-max(mlp, attention) // tp))


def experts(sizes: ModelSizes, *, tokens: int, tp: int, dtype_bytes: int) -> int:
    """The two workspaces of vLLM's experts: a row for every token and expert it meets, of the
    width that goes in or comes out, and of the columns up (modular kernels, TritonExperts)."""
    if not sizes.chosen:
        return 0
    first = max(sizes.hidden, -(-sizes.expert_width // tp))
    second = max(sizes.hidden, -(-sizes.expert_up // tp))
    return tokens * sizes.chosen * dtype_bytes * (first + second)


def logits(sizes: ModelSizes, rows: int) -> int:
    """Logits of so many rows in fp32: gathered, so whole on every rank of tensor parallelism."""
    return rows * sizes.vocabulary * FP32


def hidden(sizes: ModelSizes, *, tokens: int, dtype_bytes: int) -> int:
    """The last hidden states, which stand while the sampler runs."""
    return tokens * sizes.hidden * dtype_bytes
