"""What stands around a language model: vision and audio towers, and what projects into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvtool.errors import KvtoolError
from kvtool.model.keys import Keys, refuse
from kvtool.weights.model import Model, nested, nested_keys
from kvtool.weights.parts import Part, Size, matrix, vector
from kvtool.weights.pieces import Whole, feed_forward, stack
from kvtool.weights.vision import VISION, heads_of, size, two_layers, whole

Projector = Callable[[Model, Keys], Iterable[Part]]
"""What a model and the keys of its vision_config make of the tower's output."""


def _seen(
    kind: str, *projectors: Projector, any_type: bool = False, optional: bool = False
) -> Whole:
    """A vision tower of the class of `kind`, and what projects from it."""

    def parts(model: Model) -> Iterator[Part]:
        if optional and nested(model, "vision_config") is None:
            return
        keys = nested_keys(model, "vision_config", kind, any_type=any_type)
        tower = VISION.get(keys.model_type)
        if tower is None:
            raise KvtoolError(
                f"vision_config: {keys.model_type[:60]} has no recipe, so its weights are not counted yet",
                "give --weights 16GiB (those of the whole model), or the cache's memory with --kv-memory",
                code="weights_not_counted",
            )
        yield from tower(keys)
        for projector in projectors:
            yield from projector(model, keys)

    return parts


def _features(model: Model) -> int:
    """Layers of the tower whose outputs are concatenated."""
    chosen = model.outermost.get("vision_feature_layer")
    if isinstance(chosen, list) and chosen:
        return len(chosen)
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        return 1
    raise refuse("vision_feature_layer is neither a layer nor a list of layers")


def _llava(model: Model, tower: Keys) -> Iterator[Part]:
    """Two matrices."""
    hidden, bias = model.hidden, model.outermost.flag("multimodal_projector_bias")
    inputs = size(tower, "hidden_size") * _features(model)
    yield two_layers(hidden, matrix(inputs, hidden, bias), matrix(hidden, hidden, bias))


def _newline(model: Model, tower: Keys) -> Iterator[Part]:
    """LLaVA-NeXT: what ends a row of an image."""
    yield whole(Size(model.hidden))


def _mistral3(model: Model, tower: Keys) -> Iterator[Part]:
    """Neighbouring patches are merged first."""
    hidden = size(tower, "hidden_size")
    joined = hidden * size(model.outermost, "spatial_merge_size") ** 2
    yield whole(matrix(joined, hidden) + vector(hidden))
    yield from _llava(model, tower)


def _gemma3(model: Model, tower: Keys) -> Iterator[Part]:
    """A norm and a matrix."""
    hidden = size(tower, "hidden_size")
    yield whole(matrix(hidden, model.hidden) + vector(hidden))


def _gemma4(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix; the norm before it has no weight."""
    yield whole(matrix(size(tower, "hidden_size"), model.hidden))


def _paligemma(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix of projection_dim, which the whole model's level gives."""
    width = size(model.outermost, "projection_dim")
    yield Part(role="vision", size=matrix(size(tower, "hidden_size"), width, True), pieces=width)


def _internvl(model: Model, tower: Keys) -> Iterator[Part]:
    """A norm and two matrices over the patches that are concatenated."""
    ratio, by = model.outermost.factor("downsample_ratio")
    joined = size(tower, "hidden_size") * int(1 / ratio) ** 2
    if not joined:
        raise refuse(f"{by}: no patches are joined")
    hidden = model.hidden
    yield whole(vector(joined, True) + matrix(joined, hidden, True) + matrix(hidden, hidden, True))


def _kimi(model: Model, tower: Keys) -> Iterator[Part]:
    """A norm of projection_hidden_size, and two matrices over merged patches."""
    kernel = tower.numbers("merge_kernel_size", low=1) or []
    if len(kernel) != 2:
        raise refuse(f"{tower.path}merge_kernel_size is not a height and a width")
    joined = size(tower, "hidden_size") * kernel[0] * kernel[1]
    norm = vector(size(model.outermost, "projection_hidden_size"), True)
    yield whole(norm + matrix(joined, joined, True) + matrix(joined, model.hidden, True))


def _llama4(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix."""
    size_ = matrix(size(tower, "vision_output_dim"), model.hidden)
    yield Part(role="vision", size=size_, pieces=model.hidden)


def _mllama(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix with bias."""
    size_ = matrix(size(tower, "vision_output_dim"), model.hidden, True)
    yield Part(role="vision", size=size_, pieces=model.hidden)


def _idefics3(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix over the patches that are concatenated."""
    joined = size(tower, "hidden_size") * size(model.outermost, "scale_factor") ** 2
    yield whole(matrix(joined, model.hidden))


def _step3(model: Model, tower: Keys) -> Iterator[Part]:
    """A matrix from the width that the tower's convolutions make."""
    inputs, bias = 4 * size(tower, "width", "hidden_size"), model.outermost.flag("projector_bias")
    yield Part(role="vision", size=matrix(inputs, model.hidden, bias), pieces=model.hidden)


def _heard(model: Model) -> Iterator[Part]:
    """Gemma 4's audio tower: convolutions, conformer layers, a projection; vLLM keeps it whole."""
    if nested(model, "audio_config") is None:
        return
    keys = nested_keys(model, "audio_config", "gemma4_audio")
    hidden, outputs = size(keys, "hidden_size"), size(keys, "output_proj_dims")
    dim = hidden // heads_of(keys, hidden, "num_attention_heads")
    channels = keys.numbers("subsampling_conv_channels", low=1) or []
    if len(channels) != 2:
        raise refuse(f"{keys.path}subsampling_conv_channels are not two")
    first, second = channels
    convolutions = Size(first * 9 + first * second * 9 + first + second)
    down = matrix(first // 4 * second, hidden)
    yield Part(role="audio", size=convolutions + down)
    # Two feed-forwards of two norms, a convolution of two, three norms of the layer.
    conformer = matrix(hidden, 2 * hidden) + matrix(hidden, hidden)
    taps = size(keys, "conv_kernel_size") * hidden
    yield from stack(
        "audio",
        size(keys, "num_hidden_layers"),
        mixing=matrix(hidden, hidden) * 5 + Size(dim) + conformer + Size(taps),
        heads=0,
        feeding=feed_forward(hidden, 4 * hidden, gated=False) * 2,
        columns=0,
        vectors=9 * hidden,
    )
    yield Part(role="audio", size=matrix(hidden, outputs, True) + matrix(outputs, model.hidden))


TOWERS: dict[str, tuple[Whole, ...]] = {
    "gemma3": (_seen("siglip_vision_model", _gemma3, any_type=True),),
    "gemma4": (_seen("gemma4_vision", _gemma4, optional=True), _heard),
    "glm4v": (_seen("glm4v_vision"),),
    "idefics3": (_seen("idefics3_vision", _idefics3),),
    "internvl": (_seen("internvl_vision", _internvl),),
    "kimi_k25": (_seen("kimi_k25_vision", _kimi),),
    "llama4": (_seen("llama4_vision_model", _llama4),),
    "llava": (_seen("clip_vision_model", _llava, any_type=True),),
    "llava_next": (_seen("clip_vision_model", _llava, _newline, any_type=True),),
    "mistral3": (_seen("pixtral", _mistral3, any_type=True),),
    "mllama": (_seen("mllama_vision_model", _mllama),),
    "paligemma": (_seen("siglip_vision_model", _paligemma, any_type=True),),
    "qwen2_5_vl": (_seen("qwen2_5_vl_vision"),),
    "qwen2_vl": (_seen("qwen2_vl_vision"),),
    "qwen3_5": (_seen("qwen3_5_vision"),),
    "qwen3_5_moe": (_seen("qwen3_5_moe_vision"),),
    "qwen3_vl": (_seen("qwen3_vl_vision"),),
    "qwen3_vl_moe": (_seen("qwen3_vl_moe_vision"),),
    "smolvlm": (_seen("smolvlm_vision", _idefics3),),
    "step3p7": (_seen("step3p5_vision", _step3),),
}
"""Outermost model type → what stands beside its language model."""
