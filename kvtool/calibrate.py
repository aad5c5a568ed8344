"""How long a step takes, fitted to what `kvtool bench decode` measured on a machine."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from kvtool.catalog import class_defaults
from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.requests import SECOND_NS
from kvtool.sim.settings import StepTime
from kvtool.step_law import StepLaw

if TYPE_CHECKING:
    from kvtool.config import LoadedConfig
    from kvtool.model_pool import Gpus
    from kvtool.run import Row

CACHES = ("paged", "continuous", "contiguous", "static", "dynamic")
"""Whose rows are fitted, the first that was measured: `none` computes the prompt again for each token."""
SAME = ("model", "layers", "device", "dtype")
"""What all the rows of a fit are of."""
NUMBERS = ("batch", "prompt_tokens", "output_tokens", "ttft_s", "tpot_s_p50")
LARGEST = 3e7
MOST_RUN_BYTES = 1 << 26
UNRESOLVED = "context not resolved: run bench decode with several --prompt-tokens"
TERMS, CONTEXT = 3, 2
"""Base, tokens and context; the place of the last."""
ALL_TERMS = tuple(
    kept for size in range(TERMS, 0, -1) for kept in itertools.combinations(range(TERMS), size)
)
WORST = 0.8
"""A law that is off by more is none."""
Points = list[tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law, and the machine that it is of; None where the run does not say."""

    law: StepLaw
    model: str | None
    layers: int | None
    device: str | None
    """`cpu`, or the GPU's name."""
    dtype: str | None

    @property
    def of(self) -> str:
        """`smollm2-135m (4 layers, fp32) on cpu`."""
        known = [f"{self.layers} layers" if self.layers else "", self.dtype or ""]
        more = ", ".join(part for part in known if part)
        model = self.model or "a model without a name"
        return (
            f"{model}{f' ({more})' if more else ''} on {self.device or 'a machine without a name'}"
        )


def calibrated(path: str) -> Fit:
    """A linear law fitted to a saved run of `kvtool bench decode`: least squares over rows of one cache.

    A row says what a prefill of batch × prompt tokens took (TTFT), and what a step of `batch` tokens
    at the middle of the output did (TPOT). KvtoolError if it is no such run, or its rows do not tell
    the three terms apart.
    """
    run, measured = run_of(path)
    rows = alike(measured)
    if not rows:
        raise KvtoolError(
            f"{path}: none of its rows is of a batch of equal prompts with a cache of {', '.join(CACHES)}",
            "save one with kvtool bench decode --cache paged -o run.json",
            code="not_calibrated",
        )
    points = _points(rows)
    fitted = _fitted(points)
    if fitted is None:
        raise KvtoolError(
            f"{path}: its rows do not tell base, tokens and context apart",
            "run kvtool bench decode with several --batch and --prompt-tokens",
            code="not_calibrated",
        )
    several = len({row["prompt_tokens"] for row in rows}) > 1
    resolved = several and _is_resolved(points, fitted, CONTEXT)
    if not resolved:  # what is noise in a few batches would be the whole time of many
        fitted = _fitted(points, ((0, 1), (0,), (1,))) or fitted
    base, token, context = (term * SECOND_NS for term in fitted)
    law = StepTime(base_ns=round(base), token_ns=round(token, 6), context_ns=round(context, 6))
    off = _off(law, points)
    if off > WORST:
        raise KvtoolError(
            f"{path}: no law of base, tokens and context fits its times: the best is off by {off:.0%}",
            "measure again on a quiet machine, with several --batch and --prompt-tokens",
            code="not_calibrated",
        )
    fit = _fit_of(run, rows[0])
    source = _source(law, rows, off, len(measured) - len(rows), resolved=resolved)
    basis = f"fitted to {fit.of}, as {Path(path).name} has it, off by {off:.0%} at most"
    basis += "" if resolved else "; what context costs is not resolved, and taken to be nothing"
    return replace(
        fit, law=StepLaw(step_time=law, source=f"{Path(path).name}: {source}", basis=basis)
    )


def _points(rows: Sequence[Row]) -> Points:
    """What each row says of a step: its tokens, their context, its seconds."""
    points: Points = []
    for row in rows:
        batch, prompt, output = (row[name] for name in NUMBERS[:3])
        points.append((batch * prompt, batch * prompt, row["ttft_s"]))
        points.append((batch, batch * (prompt + output / 2), row["tpot_s_p50"]))
    return points


def _source(
    law: StepTime, rows: Sequence[Row], off: float, left_out: int, *, resolved: bool
) -> str:
    """The law, what it was fitted to, how far off it is, and where it was tried."""
    num_points = 2 * len(rows)
    others = f" ({left_out:,} other row{'' if left_out == 1 else 's'} left out)" if left_out else ""
    parts = [
        f"{law.base_ns:,} ns + {_digits(law.token_ns)} a token + {_digits(law.context_ns)} a token of context",
        f"fitted to {num_points} measured times with the {rows[0]['cache']} cache{others}, off by {off:.0%} at most",
        f"measured with batches of {_range(rows, 'batch')} and prompts of {_range(rows, 'prompt_tokens')} tokens",
    ]
    return "; ".join(parts if resolved and law.context_ns else [*parts, UNRESOLVED])


def _off(law: StepTime, points: Points) -> float:
    """How far the law is off at most, as a share of the time."""
    return max(abs(law.ns(int(t), int(c)) / SECOND_NS / seconds - 1) for t, c, seconds in points)


def _fit_of(run: Row, row: Row) -> Fit:
    """The machine that a row is of."""
    layers = row.get("layers")
    return Fit(
        law=StepLaw(step_time=StepTime(), source=""),
        model=_text(row.get("model")),
        layers=layers if type(layers) is int else None,
        device=device_of(run, row),
        dtype=_text(row.get("dtype")),
    )


def device_of(run: Row, row: Row) -> str | None:
    """`cpu`, or the GPU's name."""
    env = run.get("env")
    name = _text(env.get("device_name")) if isinstance(env, dict) else None
    device = _text(row.get("device"))
    return name if name and device == "cuda" else device


def differs(
    fit: Fit,
    load: Callable[[str], LoadedConfig],
    *,
    model: str | None,
    gpus: Gpus | None,
    dtype: str | None,
) -> str | None:
    """That the fit is of something else than what is simulated; None if it is not, as far as is known."""
    same, asked = True, "a model"
    if model is not None:
        loaded = load(model)
        shape = read_model(loaded.config, class_defaults()["types"])
        named = dtype or shape.dtype or "bf16"
        asked = f"{loaded.name} ({shape.num_modules} layers, {named})"
        same = (fit.model, fit.layers, fit.dtype) == (loaded.name, shape.num_modules, named)
    if gpus is not None:
        asked += f" on {gpus.preset.id}{f' × {gpus.tp}' if gpus.tp > 1 else ''}"
        same = same and gpus.tp == 1 and is_named(gpus.preset.id, fit.device)
    if same:
        return None
    return f"fitted to {fit.of}, not to {asked}: times are the former's, and nothing is priced"


def is_named(gpu: str, device: str | None) -> bool:
    """Whether a preset is the GPU that says `NVIDIA A100-SXM4-40GB` of itself."""
    name = (device or "").lower()
    kind, *more = gpu.split("-")
    return kind in re.split(r"[^a-z0-9]+", name) and all(
        size in name for size in more if re.fullmatch(r"\d+gb", size)
    )


def _fitted(points: Points, among: Sequence[tuple[int, ...]] = ALL_TERMS) -> list[float] | None:
    """Seconds of a step, of a token and of a token of context, none below 0: least squares relative to
    each time. Of the terms those are kept that leave the least. None if they are not told apart."""
    import numpy as np

    relative = _relative(points)
    ones = np.ones(len(points))
    if np.linalg.matrix_rank(relative / np.linalg.norm(relative, axis=0)) < TERMS:
        return None
    tried: list[tuple[float, list[float]]] = []
    for kept in among:
        found = np.zeros(TERMS)
        found[list(kept)] = np.linalg.lstsq(relative[:, kept], ones, rcond=None)[0]
        if found.min() >= 0:
            tried.append((float(((relative @ found - 1) ** 2).sum()), found.tolist()))
    return min(tried)[1] if tried else None


def _is_resolved(points: Points, fitted: Sequence[float], term: int) -> bool:
    """Whether a term is more than twice its standard error."""
    import numpy as np

    relative = _relative(points)
    scale = np.linalg.norm(relative, axis=0)
    left = float(((relative @ fitted - 1) ** 2).sum()) / max(1, len(points) - TERMS)
    inverse = np.linalg.pinv((relative / scale).T @ (relative / scale))[term, term]
    return bool(fitted[term] > 2 * np.sqrt(left * inverse) / scale[term])


def _relative(points: Points) -> Any:
    """The three terms of each point, over its time."""
    import numpy as np

    tokens, context, seconds = np.array(points, np.float64).T
    return np.stack([np.ones_like(tokens), tokens, context], axis=1) / seconds[:, None]


# -- the rows of a saved run


def run_of(path: str) -> tuple[Row, Sequence[Row]]:
    """A saved run, and its rows that say what a step took."""
    try:
        about = Path(path).stat()
        if not S_ISREG(about.st_mode):
            raise ValueError("no file: a device or a pipe may have no end")
        if about.st_size > MOST_RUN_BYTES:
            raise KvtoolError(f"{path}: larger than a run is", "give a saved run", code="too_large")
        run = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise KvtoolError(
            f"{path}: it cannot be read as a saved run ({type(error).__name__})",
            "save one with kvtool bench decode -o run.json",
            code="not_calibrated",
        ) from error
    rows = run.get("rows", ()) if isinstance(run, dict) else ()
    found = [
        row for row in (rows if isinstance(rows, list) else ())
        if isinstance(row, dict) and all(_is_number(row.get(name)) for name in NUMBERS)
    ]  # fmt: skip
    if not found:
        raise KvtoolError(
            f"{path}: none of its rows says what a step took",
            "save one with kvtool bench decode -o run.json",
            code="not_calibrated",
        )
    return run, found


def alike(rows: Sequence[Row]) -> list[Row]:
    """Uniform rows of one cache, model and machine: in them so many requests really run together."""
    for cache in CACHES:
        found = [row for row in rows if row.get("cache") == cache and row.get("run") == "uniform"]
        if found:
            return [row for row in found if all(row.get(x) == found[0].get(x) for x in SAME)]
    return []


def _digits(ns: float) -> str:
    return f"{ns:,.0f}" if ns >= 100 else f"{ns:.3g}"


def _range(rows: Sequence[Row], name: str) -> str:
    low, high = min(row[name] for row in rows), max(row[name] for row in rows)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _text(value: Any) -> str | None:
    return value[:80] if isinstance(value, str) else None


def _is_number(value: Any) -> bool:
    """Counts and seconds that a run may have: from a ns to a year."""
    return type(value) in (int, float) and 1e-9 <= value <= LARGEST
