"""Vision towers, each from its nested config: patches, positions, layers, norms.

What merges or projects their output stands with them where their class holds it; the rest is in
kvtool/weights/towers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvtool.model.keys import Keys, refuse
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import feed_forward, stack

Tower = Callable[[Keys], Iterator[Part]]


def size(keys: Keys, *names: str) -> int:
    """A size; its absence is an error that names the key."""
    return keys.need(*names).value


def whole(size: Size) -> Part:
    """What every rank keeps whole."""
    return Part(role="vision", size=size)


def two_layers(inner: int, before: Size, after: Size) -> Part:
    """A projector of two matrices, cut along the width between them."""
    return Part(role="vision", size=before + after, pieces=inner)


def heads_of(keys: Keys, hidden: int, *names: str) -> int:
    """Heads, which a width must divide into."""
    heads = size(keys, *names)
    if hidden % heads:
        raise refuse(f"{keys.path}{names[0]} = {heads} does not divide a width of {hidden}")
    return heads


def _conv(inputs: int, outputs: int, taps: int, bias: bool) -> Size:
    """A convolution, which no token is multiplied by as a matrix."""
    return Size(inputs * outputs * taps + outputs * bias)


def _sides(keys: Keys, name: str) -> tuple[int, int]:
    """Height and width, or one number for both."""
    if not isinstance(keys.get(name), list):
        side = size(keys, name)
        return side, side
    sides = keys.numbers(name, low=1) or []
    if len(sides) != 2:
        raise refuse(f"{keys.path}{name} is not a height and a width")
    return sides[0], sides[1]


def _grid(keys: Keys) -> int:
    """Patches of an image."""
    return (size(keys, "image_size") // size(keys, "patch_size")) ** 2


def _patches(keys: Keys, bias: bool, channels: str = "num_channels") -> Size:
    """The convolution that makes a patch a vector."""
    height, width = _sides(keys, "patch_size")
    return _conv(size(keys, channels), size(keys, "hidden_size"), height * width, bias)


def _layers(
    keys: Keys,
    *,
    hidden: int = 0,
    heads: str = "num_attention_heads",
    count: str = "num_hidden_layers",
    width: int = 0,
    gated: bool = False,
    qkv_bias: bool = True,
    out_bias: bool = True,
    mlp_bias: bool = True,
    norms: int = 4,
    more: int = 0,
) -> Iterator[Part]:
    """Layers of multi-head attention and an MLP. `norms`: vectors of hidden_size in each, such as 4 for
    two norms with bias; `more`: other parameters in each."""
    hidden = hidden or size(keys, "hidden_size")
    width = width or size(keys, "intermediate_size")
    yield from stack(
        "vision",
        size(keys, count),
        mixing=matrix(hidden, 3 * hidden, qkv_bias) + matrix(hidden, hidden, out_bias),
        heads=heads_of(keys, hidden, heads),
        feeding=feed_forward(hidden, width, gated=gated, bias=mlp_bias),
        columns=width,
        vectors=norms * hidden + more,
    )


def _siglip_layers(keys: Keys) -> Iterator[Part]:
    """Patches with learned positions, layers, a last norm: SigLIP, Idefics3 and SmolVLM."""
    hidden = size(keys, "hidden_size")
    yield from _layers(keys)
    yield whole(_patches(keys, True) + Size((_grid(keys) + 2) * hidden))


def _siglip(keys: Keys) -> Iterator[Part]:
    """With the head that pools all patches by attention, which most models around it switch off."""
    yield from _siglip_layers(keys)
    if keys.flag("vision_use_head"):
        hidden, width = size(keys, "hidden_size"), size(keys, "intermediate_size")
        pool = matrix(hidden, 3 * hidden, True) + matrix(hidden, hidden, True)
        yield whole(pool + feed_forward(hidden, width, gated=False, bias=True) + vector(3 * hidden))


def _clip(keys: Keys) -> Iterator[Part]:
    """A class token before the patches, norms before and after the layers."""
    yield from _layers(keys)
    tokens = _grid(keys) + 1
    yield whole(_patches(keys, False) + Size((tokens + 1 + 4) * size(keys, "hidden_size")))


def _pixtral(keys: Keys) -> Iterator[Part]:
    """Llama's layers over patches; rotary positions."""
    yield from _layers(keys, gated=True, qkv_bias=False, out_bias=False, mlp_bias=False, norms=2)
    yield whole(_patches(keys, False) + Size(size(keys, "hidden_size")))


def _internvl(keys: Keys) -> Iterator[Part]:
    """InternViT: scaled residuals, a choice of norms, norms of queries and keys as a switch."""
    hidden = size(keys, "hidden_size")
    kind = keys.get("norm_type")
    if kind not in ("layer_norm", "rms_norm"):
        raise refuse(f"{keys.path}norm_type is neither layer_norm nor rms_norm")
    norms = (4 if kind == "layer_norm" else 2) + 2 * keys.flag("use_qk_norm")
    yield from _layers(keys, qkv_bias=keys.flag("attention_bias"), norms=norms + 2)
    image, patch = _sides(keys, "image_size"), _sides(keys, "patch_size")
    vectors = 1 + keys.flag("use_mask_token")
    if keys.flag("use_absolute_position_embeddings"):
        vectors += (image[0] // patch[0]) * (image[1] // patch[1]) + 1
    if not keys.flag("use_mean_pooling"):
        vectors += 2
    yield whole(_patches(keys, True) + Size(vectors * hidden))


def _cubes(keys: Keys, hidden: int, bias: bool) -> Size:
    """Patches over time as well."""
    taps = size(keys, "temporal_patch_size") * size(keys, "patch_size") ** 2
    return _conv(size(keys, "in_channels"), hidden, taps, bias)


def _merger(keys: Keys, hidden: int, outputs: int, norm: int) -> Iterator[Part]:
    """Neighbouring patches concatenated, and two matrices to the language model's width."""
    joined = hidden * size(keys, "spatial_merge_size") ** 2
    yield two_layers(joined, matrix(joined, joined, True), matrix(joined, outputs, True))
    yield whole(vector(norm))


def _qwen2_vl(keys: Keys) -> Iterator[Part]:
    """`hidden_size` is the width that the merger makes."""
    hidden = size(keys, "embed_dim")
    yield from _layers(
        keys,
        hidden=hidden,
        heads="num_heads",
        count="depth",
        width=hidden * size(keys, "mlp_ratio"),
    )
    yield whole(_cubes(keys, hidden, False))
    yield from _merger(keys, hidden, size(keys, "hidden_size"), 2 * hidden)


def _qwen2_5_vl(keys: Keys) -> Iterator[Part]:
    """RMS norms and a gated MLP."""
    hidden = size(keys, "hidden_size")
    yield from _layers(keys, heads="num_heads", count="depth", gated=True, norms=2)
    yield whole(_cubes(keys, hidden, False))
    yield from _merger(keys, hidden, size(keys, "out_hidden_size"), hidden)


def _qwen3_5(keys: Keys) -> Iterator[Part]:
    """Learned positions."""
    hidden = size(keys, "hidden_size")
    yield from _layers(keys, heads="num_heads", count="depth")
    places = size(keys, "num_position_embeddings") * hidden
    yield whole(_cubes(keys, hidden, True) + Size(places))
    yield from _merger(keys, hidden, size(keys, "out_hidden_size"), 2 * hidden)


def _qwen3_vl(keys: Keys) -> Iterator[Part]:
    """Further mergers on the output of some layers, which norm what they have joined."""
    yield from _qwen3_5(keys)
    hidden, outputs = size(keys, "hidden_size"), size(keys, "out_hidden_size")
    joined = hidden * size(keys, "spatial_merge_size") ** 2
    for _ in keys.numbers("deepstack_visual_indexes") or ():
        yield from _merger(keys, hidden, outputs, 2 * joined)


def _glm4v(keys: Keys) -> Iterator[Part]:
    """The MLP is as wide as the output; `intermediate_size` is the merger's."""
    hidden, outputs = size(keys, "hidden_size"), size(keys, "out_hidden_size")
    yield from _layers(
        keys, heads="num_heads", count="depth", width=outputs, gated=True,
        qkv_bias=keys.flag("attention_bias"), out_bias=False, mlp_bias=False, norms=2,
    )  # fmt: skip
    joined = _conv(hidden, outputs, size(keys, "spatial_merge_size") ** 2, True)
    places = Size((_grid(keys) + 2) * hidden)
    yield whole(_cubes(keys, hidden, True) + places + joined + vector(outputs, True))
    yield Part(role="vision", size=matrix(outputs, outputs), pieces=outputs)
    width = size(keys, "intermediate_size")
    yield Part(role="vision", size=feed_forward(outputs, width, gated=True), pieces=width)


def _moonvit(keys: Keys) -> Iterator[Part]:
    """Kimi's: learned positions by height and width; time has none that are learned."""
    hidden = size(keys, "hidden_size")
    yield from _layers(keys)
    places = size(keys, "pos_emb_height") * size(keys, "pos_emb_width")
    yield whole(_conv(3, hidden, size(keys, "patch_size") ** 2, True) + Size((places + 2) * hidden))


def _llama4(keys: Keys) -> Iterator[Part]:
    """A matrix makes the patches; an adapter follows the layers."""
    hidden = size(keys, "hidden_size")
    yield from _layers(keys)
    inputs = size(keys, "num_channels") * size(keys, "patch_size") ** 2
    yield Part(role="vision", size=matrix(inputs, hidden), pieces=hidden)
    yield whole(Size((_grid(keys) + 1 + 1 + 4) * hidden))
    inner, outputs = size(keys, "projector_input_dim"), size(keys, "projector_output_dim")
    before = matrix(size(keys, "intermediate_size"), inner)
    yield two_layers(inner, before, matrix(outputs, outputs))


def _mllama(keys: Keys) -> Iterator[Part]:
    """Layers, then gated layers; positions of tiles for each ratio of sides."""
    hidden, heads = size(keys, "hidden_size"), "attention_heads"
    yield from _layers(keys, heads=heads, qkv_bias=False, out_bias=False)
    yield from _layers(
        keys, heads=heads, count="num_global_layers", qkv_bias=False, out_bias=False, more=2
    )
    ratios = keys.get("supported_aspect_ratios")
    if ratios is not None and not isinstance(ratios, list):
        raise refuse(f"{keys.path}supported_aspect_ratios is not a list")
    kinds = (8 if ratios is None else len(ratios)) + 1
    tokens = _grid(keys) + 1
    tiles = kinds * size(keys, "max_num_tiles") * (tokens + 2)
    yield whole(_patches(keys, False) + Size((tiles + tokens + 1 + 4) * hidden + 3))


def _gemma4(keys: Keys) -> Iterator[Part]:
    """Grouped heads, four norms and norms of queries and keys; vLLM keeps it whole on every rank."""
    hidden, width, dim = (
        size(keys, "hidden_size"),
        size(keys, "intermediate_size"),
        size(keys, "head_dim"),
    )
    heads, groups = size(keys, "num_attention_heads"), size(keys, "num_key_value_heads")
    q_out = matrix(hidden, heads * dim) + matrix(heads * dim, hidden)
    yield from stack(
        "vision",
        size(keys, "num_hidden_layers"),
        mixing=q_out + matrix(hidden, 2 * groups * dim),
        heads=0,
        feeding=feed_forward(hidden, width, gated=True),
        columns=0,
        vectors=4 * hidden + 2 * dim,
    )
    yield whole(matrix(3 * size(keys, "patch_size") ** 2, hidden))
    yield whole(Size(2 * size(keys, "position_embedding_size") * hidden))


def _step3(keys: Keys) -> Iterator[Part]:
    """Scaled residuals; two convolutions make the patches fewer and wider."""
    hidden, (ratio, by) = size(keys, "width", "hidden_size"), keys.factor("mlp_ratio")
    width = int(hidden * ratio)
    if not width:
        raise refuse(f"{by}: no width follows")
    yield from _layers(
        keys, hidden=hidden, heads="heads" if keys.stated("heads") else "num_attention_heads",
        count="layers" if keys.stated("layers") else "num_hidden_layers", width=width, norms=6,
    )  # fmt: skip
    patches = _conv(size(keys, "num_channels"), hidden, size(keys, "patch_size") ** 2, False)
    fewer = _conv(hidden, 2 * hidden, 9, True) + _conv(2 * hidden, 4 * hidden, 9, True)
    yield whole(patches + Size((_grid(keys) + 2) * hidden) + fewer)


VISION: dict[str, Tower] = {
    "clip_vision_model": _clip,
    "gemma4_vision": _gemma4,
    "glm4v_vision": _glm4v,
    "idefics3_vision": _siglip_layers,
    "internvl_vision": _internvl,
    "kimi_k25_vision": _moonvit,
    "llama4_vision_model": _llama4,
    "mllama_vision_model": _mllama,
    "pixtral": _pixtral,
    "qwen2_5_vl_vision": _qwen2_5_vl,
    "qwen2_vl_vision": _qwen2_vl,
    "qwen3_5_moe_vision": _qwen3_5,
    "qwen3_5_vision": _qwen3_5,
    "qwen3_vl_moe_vision": _qwen3_vl,
    "qwen3_vl_vision": _qwen3_vl,
    "siglip_vision_model": _siglip,
    "smolvlm_vision": _siglip_layers,
    "step3p5_vision": _step3,
}
"""Type of a vision_config → its tower."""
