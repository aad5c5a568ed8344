"""What a layer without growing cache keeps: convolution columns and recurrent states."""

from __future__ import annotations

from collections.abc import Callable

from kvtool.model.attention import Place, entry, swa_named
from kvtool.model.keys import Keys, Known, refuse
from kvtool.model.shape import LayerCache, State

StateReader = Callable[[Keys, Place], LayerCache]

SSM_DTYPES = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype", "inference_state_dtype")
"""Keys by which a config states the dtype of its recurrent state."""

STATE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


def conv(parts: list[tuple[int, int]], kernel: Known) -> State:
    """A causal convolution of `kernel` taps needs the last kernel − 1 columns."""
    return State(
        name="conv",
        parts=tuple(parts),
        columns=kernel.value - 1,
        held=kernel.value,
        dtype="model",
    )


def recurrent(keys: Keys, elements: int, shards: int) -> State:
    """A recurrent state: fp32 unless the config says otherwise."""
    stated = keys.find(*SSM_DTYPES)
    dtype = stated[0] if stated and stated[0] not in ("auto", "") else "float32"
    if dtype not in STATE_DTYPES:
        raise refuse(f"{keys.model_type}: a state dtype of {str(dtype)[:40]!r} is not understood")
    return State(name="ssm", parts=((elements, shards),), dtype=dtype)


def linear(place: Place, states: tuple[State, ...], *known: Known) -> LayerCache:
    """A constant-state layer; `known` are the numbers that decided it."""
    by = "; ".join(item.by for item in known)
    return LayerCache(layer=place.index, kind="linear", states=states, trace=(("state", by),))


def product(value: float, by: str) -> Known:
    """A derived whole number; a fraction is refused."""
    if value < 1 or value != int(value) or value > 2**24:
        raise refuse(f"{by} is {value:g}: a whole number is needed")
    return Known(int(value), by)


def mamba1(keys: Keys, place: Place) -> LayerCache:
    """Mamba: a state of inner × state_size, convolution over inner channels (arXiv 2312.00752)."""
    inner = keys.maybe("intermediate_size") if keys.stated("intermediate_size") else None
    if inner is None:
        factor, by = keys.factor("expand")
        hidden = keys.need("hidden_size")
        inner = product(factor * hidden.value, f"{by} × {hidden.by}")
    return _mamba1(keys, place, inner, keys.need("state_size"), keys.need("conv_kernel"))


def jamba(keys: Keys, place: Place) -> LayerCache:
    """Mamba-1 layers with mamba_… keys."""
    factor, by = keys.factor("mamba_expand")
    hidden = keys.need("hidden_size")
    inner = product(factor * hidden.value, f"{by} × {hidden.by}")
    return _mamba1(keys, place, inner, keys.need("mamba_d_state"), keys.need("mamba_d_conv"))


def _mamba1(keys: Keys, place: Place, inner: Known, size: Known, kernel: Known) -> LayerCache:
    states = (
        conv([(inner.value, inner.value)], kernel),
        recurrent(keys, inner.value * size.value, inner.value),
    )
    return linear(place, states, inner, size, kernel)


def mamba2(keys: Keys, place: Place) -> LayerCache:
    """Mamba-2: heads × head_dim × state, convolution over inner + 2 × groups × state channels.

    arXiv 2405.21060. The classes name the same numbers differently.
    """
    heads = keys.need("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    size = keys.need("mamba_d_state", "ssm_state_size", "state_size")
    groups = keys.need("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = keys.need("mamba_d_conv", "conv_kernel")
    head = _mamba2_head(keys, heads)
    inner = heads.value * head.value
    states = (
        conv([(inner, heads.value), (2 * groups.value * size.value, groups.value)], kernel),
        recurrent(keys, inner * size.value, heads.value),
    )
    return linear(place, states, heads, head, size, groups, kernel)


def _mamba2_head(keys: Keys, heads: Known) -> Known:
    own = ("head_dim",) if keys.model_type == "mamba2" else ()
    names = ("mamba_d_head", "mamba_headdim", "mamba_head_dim", *own)
    found = keys.find(*names)
    if found is not None and found[0] != "auto":
        return keys.need(*names)
    inner = keys.maybe("mamba_d_ssm")
    if inner is None:
        factor, by = keys.factor("mamba_expand")
        hidden = keys.need("hidden_size")
        inner = product(factor * hidden.value, f"{by} × {hidden.by}")
    return product(inner.value / heads.value, f"{inner.by} / {heads.by}")


def gated_delta(keys: Keys, place: Place) -> LayerCache:
    """Gated DeltaNet (Qwen3-Next): a state of value heads × key dim × value dim (arXiv 2412.06464)."""
    heads = query_or(keys, "linear_num_key_heads")
    values = query_or(keys, "linear_num_value_heads")
    k_dim = keys.maybe("linear_key_head_dim")
    if k_dim is None:
        hidden = keys.need("hidden_size")
        k_dim = product(int(0.75 * hidden.value / heads.value), f"0.75 × {hidden.by} / {heads.by}")
    v_dim = keys.maybe("linear_value_head_dim") or product(2 * k_dim.value, f"2 × {k_dim.by}")
    kernel = keys.need("linear_conv_kernel_dim")
    states = (
        conv(
            [
                (2 * heads.value * k_dim.value, heads.value),
                (values.value * v_dim.value, values.value),
            ],
            kernel,
        ),
        recurrent(keys, values.value * k_dim.value * v_dim.value, values.value),
    )
    return linear(place, states, heads, values, k_dim, v_dim, kernel)


def query_or(keys: Keys, name: str) -> Known:
    """A head count of the linear layers; absent or null means the query heads."""
    return keys.maybe(name) or keys.need("num_attention_heads")


def delta_attention(keys: Keys, place: Place) -> LayerCache:
    """Kimi delta attention: heads × dim × dim, convolution over q, k and v (arXiv 2510.26692)."""
    section = keys.section("linear_attn_config")
    own = keys.maybe("linear_num_heads") or keys.need("num_attention_heads")
    heads = section.maybe("num_heads") or own
    dim = section.maybe("head_dim") or keys.maybe("linear_head_dim") or keys.need("head_dim")
    taps = keys.maybe("linear_conv_kernel_dim") or keys.need("short_conv_kernel_size")
    kernel = section.maybe("short_conv_kernel_size") or taps
    states = (
        conv([(3 * heads.value * dim.value, heads.value)], kernel),
        recurrent(keys, heads.value * dim.value**2, heads.value),
    )
    return linear(place, states, heads, dim, kernel)


def lightning(keys: Keys, place: Place) -> LayerCache:
    """Lightning attention (MiniMax-Text-01): heads × dim × dim, no convolution."""
    whole_head = entry(keys, Place(place.index, "full"))
    heads, dim = whole_head.query_heads, whole_head.k_head_dim
    state = recurrent(keys, heads * dim * dim, heads)
    return linear(place, (state,), Known(heads, f"{heads} heads of {dim} × {dim}"))


def short_conv(keys: Keys, place: Place) -> LayerCache:
    """LFM2: a gated convolution over hidden_size channels and nothing else."""
    hidden, kernel = keys.need("hidden_size"), keys.need("conv_L_cache")
    return linear(place, (conv([(hidden.value, hidden.value)], kernel),), hidden, kernel)


def rg_lru(keys: Keys, place: Place) -> LayerCache:
    """RecurrentGemma: an RG-LRU state and a convolution over lru_width channels (arXiv 2402.19427)."""
    width = keys.maybe("lru_width") or keys.need("hidden_size")
    kernel = keys.need("conv1d_width")
    columns = State(
        name="conv",
        parts=((width.value, width.value),),
        columns=kernel.value - 1,
        held=kernel.value - 1,
        dtype="model",
    )
    return linear(place, (columns, recurrent(keys, width.value, width.value)), width, kernel)


def rwkv(keys: Keys, place: Place) -> LayerCache:
    """RWKV-4: the last hidden state twice, in the model's dtype, and three fp32 vectors."""
    hidden = keys.need("hidden_size")
    inner = keys.maybe("attention_hidden_size") or hidden
    shift = State(name="ssm", parts=((2 * hidden.value, 1),), dtype="model")
    return linear(place, (shift, recurrent(keys, 3 * inner.value, 1)), hidden, inner)


def xlstm(keys: Keys, place: Place) -> LayerCache:
    """xLSTM: a matrix memory of qk × v a head, its normaliser and a maximum (arXiv 2405.04517)."""
    heads, hidden = keys.need("num_heads"), keys.need("hidden_size", "embedding_dim")
    sizes = [
        _rounded(hidden, *keys.factor(name)) // heads.value
        for name in ("qk_dim_factor", "v_dim_factor")
    ]
    qk, value = sizes
    state = recurrent(keys, heads.value * (qk * value + qk + 1), heads.value)
    return linear(place, (state,), heads, hidden)


def _rounded(hidden: Known, factor: float, by: str) -> int:
    """hidden × factor, rounded up to a multiple of 64 as the class does."""
    return -(-int(hidden.value * factor) // 64) * 64


def zaya_states(keys: Keys, place: Place) -> LayerCache:
    """ZAYA's compressed convolutional attention: two chained convolutions over q and k, one value."""
    attention = entry(keys, Place(place.index, "full"))
    channels = (attention.query_heads + attention.kv_heads) * attention.k_head_dim
    first, second = keys.need("cca_time0"), keys.need("cca_time1")
    columns = first.value + second.value - 2
    value = attention.kv_heads * attention.k_head_dim // 2
    states = (
        State(
            name="conv",
            parts=((channels, attention.kv_heads),),
            columns=columns,
            held=columns,
            dtype="model",
        ),
        State(name="ssm", parts=((value, attention.kv_heads),), dtype="model"),
    )
    return linear(place, states, first, second)


def inkling_states(keys: Keys, place: Place) -> LayerCache:
    """Inkling: four short convolutions a layer, over k, v and twice the hidden state."""
    attention = swa_named(keys, place)
    narrow = attention.kv_heads * attention.k_head_dim
    hidden, kernel = keys.need("hidden_size"), keys.need("conv_kernel_size")
    states = (
        conv([(2 * narrow, attention.kv_heads)], kernel),
        conv([(2 * hidden.value, hidden.value)], kernel),
    )
    return linear(place, states, hidden, kernel)
