"""How many parameters a plain dense decoder has, counted from its config.

One row a model type, read off the modules of its class in transformers 5.24 and compared with the
class itself in tests/test_pool.py. Experts, quantised weights and types without a row are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvtool import catalog
from kvtool.dtypes import Dtype
from kvtool.errors import KvtoolError, usage_error
from kvtool.model.keys import Keys
from kvtool.model.nested import Part, language_part
from kvtool.model.shape import ModelShape
from kvtool.units import format_bytes

Flag = bool | tuple[str, bool]
"""Yes, no, or the key that says so and its class default."""
QUANTISED = ("quantization_config", "compression_config", "hf_quant_config")


def _two(keys: Keys) -> int:
    return 2


def _falcon_norms(keys: Keys) -> int:
    """One where attention and MLP run in parallel, unless the new architecture asks for two."""
    if not keys.flag("parallel_attn", default=True):
        return 2
    stated = keys.maybe("num_ln_in_parallel_attn")
    if stated is not None:
        return 2 if stated.value == 2 else 1
    return 2 if keys.flag("new_decoder_architecture") else 1


def _opt_last_norm(keys: Keys) -> bool:
    """A final norm, but for OPT-350M, which normalises after each layer."""
    before = keys.flag("do_layer_norm_before", default=True)
    return before and not keys.flag("_remove_final_layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """What differs from Llama: RMS norms, a gated MLP, no biases, a head of its own."""

    tied: bool = False
    """tie_word_embeddings of the class: the head is the embedding."""
    width: tuple[str, ...] = ("intermediate_size",)
    """Keys of the MLP's width; 4 × hidden_size where the class says so (`wide`)."""
    wide: bool = False
    gated: bool = True
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: bool = False
    """A norm of the head's size on queries and on keys."""
    norms: Callable[[Keys], int] = _two
    norm_bias: bool = False
    """LayerNorm: a bias beside each weight."""
    norm_weight: Flag = True
    last_norm: Callable[[Keys], bool] = lambda keys: True
    positions: int | None = None
    """Learned positions: how many more than the maximum context; None: none."""
    projected: bool = False
    """OPT-350M's embeddings of word_embed_proj_dim, projected in and out."""


_NORMED: dict[str, Any] = {"gated": False, "norm_bias": True}
_ATTENTION_BIAS: dict[str, Any] = {
    "qkv_bias": ("attention_bias", False),
    "out_bias": ("attention_bias", False),
}
DECODERS: dict[str, Decoder] = {
    "llama": Decoder(**_ATTENTION_BIAS, mlp_bias=("mlp_bias", False)),
    "mistral": Decoder(),
    "phi3": Decoder(),
    "qwen2": Decoder(qkv_bias=True),
    "qwen3": Decoder(**_ATTENTION_BIAS, qk_norm=True),
    "gemma": Decoder(**_ATTENTION_BIAS, tied=True),
    "gpt_neox": Decoder(**_NORMED, qkv_bias=("attention_bias", True),
                        out_bias=("attention_bias", True), mlp_bias=True),
    "gpt2": Decoder(**_NORMED, tied=True, width=("n_inner",), wide=True, qkv_bias=True,
                    out_bias=True, mlp_bias=True, positions=0),
    "opt": Decoder(**_NORMED, tied=True, width=("ffn_dim",), qkv_bias=("enable_bias", True),
                   out_bias=("enable_bias", True), mlp_bias=("enable_bias", True), positions=2,
                   norm_weight=("layer_norm_elementwise_affine", True), last_norm=_opt_last_norm,
                   projected=True),
    "falcon": Decoder(**_NORMED, tied=True, width=("ffn_hidden_size",), wide=True,
                      qkv_bias=("bias", False), out_bias=("bias", False),
                      mlp_bias=("bias", False), norms=_falcon_norms),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Parameters of a whole model, and which of them multiply a token."""

    total: int
    matrices: int
    """Of the layers, without norms and biases: each multiplies every token once."""
    head: int
    """The matrix from hidden state to words; the embedding table itself where it is tied."""

    @property
    def looked_up(self) -> int:
        """Of the embedding table where it is not the head: then it stands beside the matrices too."""
        return self.head if self.total - self.matrices >= 2 * self.head else 0


def parameters(name: str, config: Mapping[str, Any], shape: ModelShape) -> int:
    """Parameters of the whole model, the head included; exact for the types of `DECODERS`.

    `shape` is read from the same config. What is not counted yet is refused, by `name`.
    """
    return count(name, config, shape).total


def count(name: str, config: Mapping[str, Any], shape: ModelShape) -> Counted:
    """The same, with those of the layers' matrices and of the head apart."""
    part = language_part(config, catalog.class_defaults()["types"])
    keys = part.keys
    row = DECODERS.get(keys.model_type)
    why = _uncounted(part, shape)
    if row is None or why:
        raise _refusal(name, why)
    hidden = _size(name, keys, "hidden_size")
    norm = hidden * (1 + row.norm_bias) if _is(keys, row.norm_weight) else 0
    mlp, mlp_biases = _mlp(name, keys, row, hidden)
    head, projections, other = _embeddings(name, keys, row, hidden)
    other += norm * row.last_norm(keys)
    matrices = projections
    for entry in shape.layers:
        qkv = entry.query_heads * entry.k_head_dim
        qkv += entry.kv_heads * (entry.k_head_dim + entry.v_head_dim)
        matrices += hidden * (qkv + entry.query_heads * entry.v_head_dim) + mlp
        other += qkv * _is(keys, row.qkv_bias) + hidden * _is(keys, row.out_bias) + mlp_biases
        other += 2 * entry.k_head_dim * row.qk_norm + norm * row.norms(keys)
    return Counted(total=head + matrices + other, matrices=matrices, head=head)


def estimate(
    name: str, config: Mapping[str, Any], shape: ModelShape, dtype: Dtype
) -> tuple[int, str]:
    """Bytes of all parameters in one dtype, and the note that this is an estimate."""
    number = parameters(name, config, shape)
    weights = number * dtype.bits // 8
    return weights, (
        f"{name}: its weights are an estimate: {number:,} parameters in "
        f"{dtype.name} are {format_bytes(weights)} (--weights sets them)"
    )


def of_bytes(
    name: str, config: Mapping[str, Any], shape: ModelShape, dtype: Dtype, weights: int
) -> tuple[Counted, str]:
    """What a dense model that is not counted has by the bytes of its weights, and the note on it.

    Of all parameters, the embedding table multiplies nothing; the rest is taken to be matrices.
    A config that does not say so is tied: transformers writes tie_word_embeddings if it is false.
    """
    part = language_part(config, catalog.class_defaults()["types"])
    quantised = next((key for key in QUANTISED if part.anywhere(key) is not None), "")
    stated = part.anywhere("dtype", "torch_dtype")
    if quantised or (shape.dtype is None and stated not in (None, "", "auto")):
        raise _refusal(name, f"its config has {quantised or str(stated)[:40]}: bytes do not tell")
    total = weights * 8 // dtype.bits
    hidden, words = part.keys.maybe("hidden_size"), part.keys.maybe("vocab_size")
    head = hidden.value * words.value if hidden and words else 0
    tables = head if part.anywhere("tie_word_embeddings") in (None, True) else 2 * head
    if total <= tables:
        raise usage_error(
            f"--weights: {format_bytes(weights)} in {dtype.name} are {total:,} parameters, and the "
            f"embeddings of {name} alone have {tables:,}",
            "give the bytes of the whole model",
        )
    less = f"less {tables:,} of embeddings" if tables else "embeddings included"
    return Counted(total=total, matrices=total - tables, head=head), (
        f"{name}: its parameters are an estimate: {format_bytes(weights)} in {dtype.name} are "
        f"{total:,}, {less}"
    )


def has_experts(config: Mapping[str, Any]) -> bool:
    """More than one expert, as the config says or the class of its type has it."""
    stated = list(_expert_keys(config))
    if any(isinstance(value, int) and value > 1 for _, value in stated):
        return True
    keys = language_part(config, catalog.class_defaults()["types"]).keys
    chosen = "num_experts_per_tok"
    return chosen not in dict(stated) and bool(keys.defaults.get(chosen))


def _expert_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key that speaks of experts, at every level."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _expert_keys(value)
        elif "expert" in key:
            yield key, value


def _uncounted(part: Part, shape: ModelShape) -> str:
    """Why the config's weights cannot be counted; empty if they can."""
    keys = part.keys
    if part.above:
        return "it is a model of several parts"
    if keys.model_type not in DECODERS:
        return f"{keys.model_type[:60]} is not among {', '.join(DECODERS)}"
    quantised = next((one for one in QUANTISED if keys.raw.get(one) is not None), "")
    if quantised:
        return f"its config has a {quantised}"
    stated = part.anywhere("dtype", "torch_dtype")
    if shape.dtype is None and stated not in (None, "", "auto"):
        return f"its config has them in {str(stated)[:40]}"
    if keys.raw.get("per_layer_config") is not None:
        return "its layers differ"
    return ""


def _refusal(name: str, why: str) -> KvtoolError:
    return KvtoolError(
        f"{name}: its weights are not counted yet ({why})",
        "give --weights 16GiB (those of the whole model), or --kv-memory in place of --gpu",
        code="weights_not_counted",
    )


def _size(name: str, keys: Keys, *names: str) -> int:
    """A size, as the config or its class has it; vocab_size and the MLP's width are in no table of
    class defaults, and a config without them is refused."""
    known = keys.maybe(*names)
    if known is None:
        raise _refusal(name, f"its config has no {names[0]}")
    return known.value


def _is(keys: Keys, flag: Flag) -> bool:
    return flag if isinstance(flag, bool) else keys.flag(flag[0], default=flag[1])


def _mlp(name: str, keys: Keys, row: Decoder, hidden: int) -> tuple[int, int]:
    """Parameters of one layer's MLP: its matrices, its biases."""
    stated = keys.maybe(*row.width)
    width = 4 * hidden if row.wide and stated is None else _size(name, keys, *row.width)
    ups = 2 if row.gated else 1
    biases = ups * width + hidden if _is(keys, row.mlp_bias) else 0
    return (ups + 1) * hidden * width, biases


def _embeddings(name: str, keys: Keys, row: Decoder, hidden: int) -> tuple[int, int, int]:
    """The head; projections beside the table; the table if it is not the head, and positions."""
    stated = keys.maybe("word_embed_proj_dim") if row.projected else None
    width = stated.value if stated else hidden
    head = _size(name, keys, "vocab_size") * width
    other = 0 if keys.flag("tie_word_embeddings", default=row.tied) else head
    if row.positions is not None:
        places = _size(name, keys, "max_position_embeddings", "n_positions")
        other += (places + row.positions) * hidden
    return head, 2 * hidden * width if width != hidden else 0, other
