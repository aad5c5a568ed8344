"""Which kind each layer is, where the config lists them: the words of `layer_types` and its kin."""

from __future__ import annotations

from kvtool.model.keys import Keys, refuse

Words = list[str]

FULL, SLIDING, CHUNKED, LINEAR, CONV = "full", "sliding", "chunked", "linear", "conv"
INDEXED, SPARSE, HYBRID, HYBRID_SLIDING = "indexed", "sparse", "hybrid", "hybrid sliding"
CSA, HCA, REFERENCE, NONE = "csa", "hca", "reference", "none"

MEANING = {
    "full_attention": FULL, "attention": FULL, "full": FULL, "global": FULL,
    "global_attention": FULL, "*": FULL,
    "sliding_attention": SLIDING, "sliding": SLIDING, "local": SLIDING, "local_attention": SLIDING,
    "sliding_window_attention": SLIDING,
    "chunked_attention": CHUNKED,
    "linear_attention": LINEAR, "mamba": LINEAR, "mamba2": LINEAR, "recurrent": LINEAR,
    "gated_delta_net": LINEAR, "M": LINEAR,
    "conv": CONV, "short_conv": CONV,
    "indexed_attention": INDEXED, "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
    "minimax_m3_sparse": SPARSE,
    "hybrid": HYBRID, "hybrid_sliding": HYBRID_SLIDING,
    "compressed_sparse_attention": CSA, "heavily_compressed_attention": HCA,
    "reference_sliding_attention": REFERENCE,
    "moe": NONE, "mlp": NONE, "-": NONE, "E": NONE,
}  # fmt: skip

LISTS = ("layer_types", "layers_block_type", "layer_block_type", "block_types")


def meaning(words: Words, by: str) -> Words:
    """The words of a config as kinds; a word that kvtool does not know is refused by name."""
    unknown = sorted({word for word in words if word not in MEANING})
    if unknown:
        raise refuse(f"{by}: layer kind {unknown[0][:60]!r} is not understood")
    return [MEANING[word] for word in words]


def listed(keys: Keys, count: int | None) -> tuple[Words, str] | None:
    """Kinds from the config's own list, cut to the number of layers; None if it has no list."""
    found = keys.words(*[name for name in LISTS if name in keys.raw] or LISTS[:1])
    if found is None:
        return None
    words, by = found
    if count is not None and len(words) < count:
        raise refuse(f"{by} has {len(words)} entries for {count} layers")
    return meaning(words[:count], by), by
