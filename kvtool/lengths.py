"""How long prompts and outputs are: distributions of token counts, as typed on the command line.

A value is clip(low − 1 + ceil(scale · x), low, cap), with x drawn from the distribution at a scale
of 1. The scale is solved so that the mean *after* clipping is the one that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtool.distributions import DISTRIBUTIONS, Given, Parameter
from kvtool.errors import did_you_mean, usage_error
from kvtool.lengths_file import read_lengths
from kvtool.units import parse_count

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Column = NDArray[np.int64]

TOLERANCE = 2e-3
"""How far the mean of the pilot may be from the mean asked for, as a share of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Token counts of prompts, or of outputs: a distribution, its mean and the cap.

    `mean` is in tokens, after clipping; `clipped_share` is the share of values that the cap cuts.
    """

    spec: str
    kind: str
    given: Given
    cap: int
    low: int = 1
    scale: float = 1.0
    mean: float = 1.0
    clipped_share: float = 0.0

    @property
    def num_columns(self) -> int:
        """Columns of the file behind `empirical`, or 0."""
        return len(self.given.measured.columns) if self.given.measured else 0


def parse_lengths(
    spec: str,
    *,
    name: str,
    mean: float | None,
    cap: int,
    default_mean: float | None = None,
    column: int = 0,
) -> Lengths:
    """`lognormal:sigma=1.1`, `fixed:161`, `empirical:FILE`; `name` is the option, for errors.

    `default_mean` counts if no `mean` is given and the spec does not say it all. `column` is the one
    to take of a file that has two: 0 for prompts, 1 for outputs.
    """
    spec = spec.strip()
    kind, given = _parse(spec, name, column)
    lengths = Lengths(spec=spec, kind=kind, given=given, cap=cap)
    own = DISTRIBUTIONS[kind].own_range(given, f"{name}: {spec}")
    if own is not None and mean is not None:
        raise usage_error(
            f"{name}: {spec} has a mean of its own, and {mean:,.10g} is asked for",
            f"leave the mean out, or scale another distribution to it: {name} lognormal",
        )
    if own is not None:
        return _measure(replace(lengths, low=own[0], scale=own[1]))
    mean = _wanted(lengths, default_mean if mean is None else mean, name)
    if kind == "fixed":
        return _measure(replace(lengths, scale=float(round(mean))))
    return replace(_measure(_solve(lengths, mean, name)), mean=mean)


def sampler(lengths: Lengths) -> Callable[[Generator, int], Column]:
    """Draws values of 1 to the cap; drawn in pieces of any size they are the same sequence."""
    import numpy as np

    entry = DISTRIBUTIONS[lengths.kind]

    def sample(rng: Generator, count: int) -> Column:
        x = entry.unit(entry.source.draw(rng, count, lengths.given), lengths.given)
        return _clip(_ceil(x, lengths), lengths).astype(np.int64)

    return sample


def _parse(spec: str, name: str, column: int) -> tuple[str, Given]:
    kind, colon, rest = (part.strip() for part in spec.partition(":"))
    kind = kind.lower()
    if kind not in DISTRIBUTIONS:
        raise usage_error(
            f"{name}: there is no distribution '{kind}'",
            f"choose from {', '.join(DISTRIBUTIONS)}.{did_you_mean(kind, DISTRIBUTIONS)}",
        )
    if kind == "empirical":
        if not rest:
            raise usage_error(f"{name}: {kind} needs a file", f"write {name} {kind}:FILE")
        measured = read_lengths(rest, name=name)
        return kind, Given({}, measured, min(column, len(measured.columns) - 1))
    if kind == "fixed" and colon and "=" not in rest:
        rest = f"tokens={rest}"
    return kind, Given(_parameters(kind, rest.split(",") if colon else [], f"{name}: {kind}"))


def _parameters(kind: str, typed: list[str], where: str) -> dict[str, float]:
    known = DISTRIBUTIONS[kind].parameters
    if typed and not known:
        raise usage_error(f"{where} takes no parameters", f"write {kind} alone")
    seen: dict[str, float] = {}
    for part in typed:
        key, equals, text = (word.strip() for word in part.partition("="))
        if key not in known or not equals:
            raise usage_error(
                f"{where} does not take '{part.strip()}'",
                f"write {kind}:{','.join(f'{one}=NUMBER' for one in known)}."
                f"{did_you_mean(key, known)}",
            )
        if key in seen:
            raise usage_error(f"{where} has {key} twice", f"write {key} once")
        seen[key] = _value(text, known[key], f"{where}:{key}")
    return {key: one.default for key, one in known.items() if one.default is not None} | seen


def _value(text: str, parameter: Parameter, where: str) -> float:
    low, high, default, whole = parameter
    if whole:
        return parse_count(text, name=where, low=int(low), high=int(high))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise usage_error(
            f"{where}: '{text}' is not a number from {low:g} to {high:g}",
            f"leave it out for the default of {default:g}",
        )
    return value


def _wanted(lengths: Lengths, mean: float | None, name: str) -> float:
    """The mean, if some scale can give it: with a cap, no mean can reach the cap."""
    cap, spec = lengths.cap, lengths.spec
    if mean is None:
        raise usage_error(
            f"{name}: {spec} needs a mean", "give one, or lengths that have their own: fixed:161"
        )
    if not mean >= 1:
        raise usage_error(
            f"{name}: a mean of {mean:,.10g} tokens is too small", "every length is 1 token or more"
        )
    if mean > cap or (mean == cap and lengths.kind != "fixed"):
        raise usage_error(
            f"{name}: with lengths cut at {cap:,} tokens {spec} cannot have a mean of {mean:,.10g}",
            "ask for a mean below the cap, or raise the cap",
        )
    return mean


def _solve(lengths: Lengths, mean: float, name: str) -> Lengths:
    """The lengths at the scale that gives the mean: the mean rises with the scale, so bisection."""
    pilot = _pilot(lengths)
    low, high = -700.0, 700.0  # logarithms: all that a float holds
    for _ in range(64):
        middle = (low + high) / 2
        if _mean(replace(lengths, scale=math.exp(middle)), pilot) < mean:
            low = middle
        else:
            high = middle
    solved = replace(lengths, scale=math.exp(high))
    reached = _mean(solved, pilot)
    if abs(reached - mean) > TOLERANCE * mean:
        raise usage_error(
            f"{name}: no scale gives {lengths.spec}, cut at {lengths.cap:,} tokens, a mean of"
            f" {mean:,.10g}; the nearest is {reached:,.10g}",
            "take a parameter that is less extreme, or another mean",
        )
    return solved


def _measure(lengths: Lengths) -> Lengths:
    """With the mean and the share of values that are cut, as the pilot sample has them."""
    x, weights = _pilot(lengths)
    cut = float(weights[_ceil(x, lengths) > lengths.cap].sum())
    return replace(lengths, mean=_mean(lengths, (x, weights)), clipped_share=min(cut, 1.0))


def _mean(lengths: Lengths, pilot: tuple[Floats, Floats]) -> float:
    x, weights = pilot
    # Not a dot product: the threads of BLAS take longer to wake than this takes.
    return float((weights * _clip(_ceil(x, lengths), lengths)).sum())


def _pilot(lengths: Lengths) -> tuple[Floats, Floats]:
    entry = DISTRIBUTIONS[lengths.kind]
    points, weights = entry.source.pilot(lengths.given)
    return entry.unit(points, lengths.given), weights / weights.sum()


def _ceil(x: Floats, lengths: Lengths) -> Floats:
    import numpy as np

    with np.errstate(over="ignore"):  # an infinite length is cut like any other
        whole = x * lengths.scale
    np.ceil(whole, out=whole)
    if lengths.low > 1:
        whole += lengths.low - 1
    return whole


def _clip(whole: Floats, lengths: Lengths) -> Floats:
    import numpy as np

    return np.clip(whole, lengths.low, lengths.cap, out=whole)
