"""Is the prediction what transformers really holds? A model at full size, without weights, says so.

The user's config is built on torch's meta device, where a tensor has a shape and no memory, a
prompt is run through it, and what its cache holds is compared with the prediction layer by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvtool import live
from kvtool.cache import CacheLayout
from kvtool.dtypes import Dtype, KvDtype
from kvtool.engines.transformers import parts
from kvtool.errors import KvtoolError
from kvtool.guard import DEADLINE_S, deadline, offline, plain_config, quiet, refuse_huge
from kvtool.model.shape import ModelShape
from kvtool.run import Row
from kvtool.size_row import Subject
from kvtool.sizing import check_context, encoder_length, model_dtype

SHORT = 32
"""Tokens of the prompt where no window has to be filled."""
LONGEST_DEFAULT = 16 * 1024

TORCH_NAMES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to run: the prompt, the number of sequences, the dtype and the kind of cache."""

    context: int | None = None
    """None: enough to fill every window, else a few."""
    batch: int = 1
    dtype: Dtype | None = None
    cache: str = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run, every number resolved."""

    context: int
    encoder: int
    batch: int
    dtype: Dtype
    cache: str


def check_rows(
    subject: Subject, config: Mapping[str, Any], asked: Asked
) -> tuple[list[Row], list[str]]:
    """A row for each layer and kind of tensor, predicted and real, and notes."""
    shape = subject.shape
    dtype, dtype_note = model_dtype(shape, asked.dtype)
    context = asked.context or default_context(shape)
    long_note = check_context(shape, context, allow_long=False)
    case = Trial(
        context=context,
        encoder=encoder_length(shape, None, context)[0],
        batch=asked.batch,
        dtype=dtype,
        cache=asked.cache,
    )
    predict(shape, case)  # what is refused is refused before the model is built
    tensors, note = held_at_full_size(config, shape, case)
    crossed = [one.shape[2] for one in tensors if one.kind == "cross_k"]
    case = replace(case, encoder=crossed[0] if crossed else 0)
    missing = shape.encoder_tokens is not None and not crossed
    least = min((e.window for e in shape.layers if e.window is not None), default=0)
    skipped = [
        *(["what is not text"] if note else []),
        *(["cross-attention"] if missing else []),
        *(["full windows"] if context < least and case.cache == "dynamic" else []),
    ]
    notes = [dtype_note, long_note, note]
    if missing:
        notes.append("run on text alone: cross-attention layers hold nothing")
    if context < least:
        notes.append(f"no window of {least:,} tokens was filled (--context)")
    rows = _rows(subject, case, predict(shape, case), tensors)
    rows = [row | {"not_compared": ", ".join(skipped)} for row in rows]
    return rows, [f"{subject.name}: {note.split(' (--')[0]}" for note in notes if note]


def predict(shape: ModelShape, case: Trial) -> dict[tuple[int, str], int]:
    """(layer, kind) → bytes of all sequences, as the engine `transformers` says."""
    layout = CacheLayout(shape=shape, dtype=case.dtype, kv=KvDtype(k=case.dtype, v=case.dtype))
    found: Counter[tuple[int, str]] = Counter()
    for part in parts(
        layout,
        context=case.context,
        encoder=case.encoder,
        prompt=case.context,
        cache=case.cache,
    ):
        found[part.layer, part.kind] += part.bytes * case.batch * shape.rows_per_sequence
    return dict(found)


def default_context(shape: ModelShape) -> int:
    """A few tokens more than the largest window, where nothing is computed token by token."""
    windows = [entry.window for entry in shape.layers if entry.window is not None]
    steps = any(entry.kind == "linear" for entry in shape.layers)
    wanted = SHORT if steps or not windows else min(max(windows) + SHORT, LONGEST_DEFAULT)
    return wanted if shape.max_context is None else min(wanted, shape.max_context)


def _rows(
    subject: Subject,
    case: Trial,
    predicted: dict[tuple[int, str], int],
    tensors: tuple[live.Held, ...],
) -> list[Row]:
    if any(one.layer == live.ALL_LAYERS for one in tensors):
        predicted = _over_layers(predicted)
    real: dict[tuple[int, str], list[live.Held]] = {}
    for one in tensors:
        real.setdefault((one.layer, one.kind), []).append(one)
    head = {
        "model": subject.name,
        "model_type": subject.shape.model_type,
        "source": subject.source,
        "context_tokens": case.context,
        "encoder_tokens": case.encoder,
        "batch": case.batch,
        "cache": case.cache,
    }
    return [
        head | _compared(place, predicted.get(place, 0), real.get(place, []))
        for place in sorted({*predicted, *real})
        if predicted.get(place) or place in real
    ]


def _compared(place: tuple[int, str], predicted: int, tensors: list[live.Held]) -> Row:
    """What was predicted of one kind of tensor in one layer, and what is there."""
    layer, kind = place
    held = sum(one.bytes for one in tensors)
    return {
        "layer": None if layer == live.ALL_LAYERS else layer,
        "kind": kind,
        "predicted_bytes": predicted,
        "real_bytes": held,
        "shape": _shapes(tensors),
        "dtype": "/".join(dict.fromkeys(one.dtype for one in tensors)),
        "equal": predicted == held,
    }


def _shapes(tensors: list[live.Held]) -> str:
    """'1×8×32×128', the shapes of several tensors with a plus between."""
    return " + ".join("×".join(str(size) for size in one.shape) for one in tensors)


def _over_layers(predicted: dict[tuple[int, str], int]) -> dict[tuple[int, str], int]:
    """For a cache whose tensors hold every layer's state."""
    out: dict[tuple[int, str], int] = {}
    for (_, kind), count in predicted.items():
        out[live.ALL_LAYERS, kind] = out.get((live.ALL_LAYERS, kind), 0) + count
    return out


def held_at_full_size(
    config: Mapping[str, Any], shape: ModelShape, case: Trial
) -> tuple[tuple[live.Held, ...], str]:
    """The tensors of the cache after a prompt of `context` tokens, and a note if not of the whole."""
    _, transformers = live.load_libraries()
    kind = str(config.get("model_type"))
    refuse_huge(config)
    with deadline(DEADLINE_S), quiet(), offline():
        try:
            cls = live.config_class(kind)
        except KeyError:
            raise _unknown(kind, config, transformers.__version__) from None
        whole, reason = _attempt(lambda: cls.from_dict(plain_config(config)))
        if whole is not None:
            tensors, reason = _attempt(lambda: _run(whole, shape, case))
            if tensors is not None:
                return tensors, ""
            tensors, _ = _attempt(lambda: _run(_text_part(whole), shape, case))
            if tensors is not None:
                return tensors, f"only its text part was run: the whole fails with {reason}"
    raise KvtoolError(
        f"transformers {transformers.__version__} cannot run {kind} without weights: {reason}",
        "kvtool size MODEL --engine transformers predicts its cache all the same",
        code="not_buildable",
    )


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or None and the reason: a class of transformers may fail in any way."""
    try:
        return work(), ""
    except Exception as error:  # noqa: BLE001 - said above
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return None, f"{type(error).__name__}: {' '.join(lines)[:160]}"


def _unknown(kind: str, config: Mapping[str, Any], version: str) -> KvtoolError:
    remote = (
        "its code is in its own repository, which is never run; " if config.get("auto_map") else ""
    )
    return KvtoolError(
        f"transformers {version} has no model type '{kind[:60]}', so there is nothing to compare with",
        f"{remote}kvtool size MODEL predicts its cache from the config",
        code="not_buildable",
    )


def _text_part(config: Any) -> Any:
    """The part of a composite that keeps the cache."""
    text = config.get_text_config(decoder=True)
    if text is config:
        raise ValueError("it has no text part")
    return text


def _run(config: Any, shape: ModelShape, case: Trial) -> tuple[live.Held, ...]:
    with live.unweighted():
        model = live.build(config, device="meta", dtype=TORCH_NAMES[case.dtype.name])
        rows = case.batch * shape.rows_per_sequence
        inputs = live.prompt(model, rows=rows, tokens=case.context, encoder=case.encoder)
        if case.cache == "static":
            inputs |= live.static_cache(model, case.context)
        name, cache, _ = live.fill(model, inputs)
    found = live.held(cache, name)
    if not found:
        raise RuntimeError("its class fills no cache")
    return found


def difference(rows: tuple[Row, ...]) -> KvtoolError | None:
    """The gate: an error if anything that is held was predicted otherwise."""
    wrong = [row for row in rows if not row["equal"]]
    if not wrong:
        return None
    models = list(dict.fromkeys(row["model"] for row in wrong))
    return KvtoolError(
        f"{', '.join(models)}: {len(wrong)} of {len(rows)} rows differ from what was predicted",
        "please report it with the output of --json: the prediction for this model is wrong",
        code="differs",
    )
