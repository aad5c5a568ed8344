"""The distributions of lengths, one row each: how x is drawn at a scale of 1, and its pilot sample.

Everything that has an inverse of its survival function is made from an exponential draw e, which is
−log of the survival: x = exp(e/α) is Pareto's, for P(x > t) = t^−α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvtool.errors import usage_error
from kvtool.lengths_file import Measured
from kvtool.units import MAX_COUNT

if TYPE_CHECKING:
    import numpy as np
    from numpy.random import Generator
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PILOT = 2**15
"""Points of the pilot sample: evenly laid and weighted by their density, so that it has no noise of
its own. A random one, even of 2**17 values, is several percent off where the tail is heavy."""

_ZIPF_TABLE = 1024


class Given(NamedTuple):
    """What a spec gives its distribution: parameters, or a column of what was measured."""

    params: Mapping[str, float]
    measured: Measured | None = None
    column: int = 0


class Source(NamedTuple):
    """Where x comes from: draws of it, and the points and weights of its pilot sample."""

    draw: Callable[[Generator, int, Given], Floats]
    pilot: Callable[[Given], tuple[Floats, Floats]]


class Parameter(NamedTuple):
    """The range of a parameter; one without a default may be left out."""

    low: float
    high: float
    default: float | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Distribution:
    """One row of the table: x is what `unit` makes of the source's draws."""

    source: Source
    unit: Callable[[Floats, Given], Floats] = lambda x, _: x
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    own_range: Callable[[Given, str], tuple[int, float] | None] = lambda _, __: None
    """The low and the scale that the spec itself gives; where it gives none, the mean decides."""


def _normal_pilot(given: Given) -> tuple[Floats, Floats]:
    import numpy as np

    z = np.linspace(-9, 9, PILOT, dtype=np.float64)
    return z, np.exp(-z * z / 2)


def _exponential_pilot(given: Given) -> tuple[Floats, Floats]:
    import numpy as np

    x = (np.arange(PILOT, dtype=np.float64) + 0.5) * (45 / PILOT)
    return x, np.exp(-x)


def _gamma_pilot(given: Given) -> tuple[Floats, Floats]:
    """On the logarithm of x, whose density is exp(shape · t − exp(t)): small x matter as well."""
    import numpy as np

    shape = given.params["shape"]
    low = math.log(shape) - 40 / shape - 10 / math.sqrt(shape)
    t = np.linspace(low, math.log(shape + 12 * math.sqrt(shape) + 45), PILOT)
    density = shape * t - np.exp(t)
    return np.exp(t), np.exp(density - density.max())


def _even_pilot(given: Given) -> tuple[Floats, Floats]:
    import numpy as np

    return (np.arange(PILOT) + 0.5) / PILOT, np.ones(PILOT)


def _ones(count: int) -> Floats:
    import numpy as np

    return np.ones(count)


def _file_pilot(given: Given) -> tuple[Floats, Floats]:
    import numpy as np

    assert given.measured is not None
    if given.measured.cumulative is not None:
        return _even_pilot(given)
    values = given.measured.columns[given.column].astype(np.float64)
    return values, np.ones(len(values))


def _file_draw(rng: Generator, count: int, given: Given) -> Floats:
    """Values of rows drawn with replacement; for a cumulative distribution, shares."""
    assert given.measured is not None
    if given.measured.cumulative is not None:
        return rng.random(count)
    values = given.measured.columns[given.column]
    drawn: Floats = values[rng.integers(0, len(values), count)].astype("float64")
    return drawn


def _file_unit(x: Floats, given: Given) -> Floats:
    """Shares into tokens: rounded up, they are even from one point's plus 1 to the next's."""
    import numpy as np

    assert given.measured is not None
    cumulative = given.measured.cumulative
    return x if cumulative is None else np.interp(x, cumulative, given.measured.columns[0])


def _zipf(e: Floats, given: Given) -> Floats:
    """P(k) ∝ k^−a, each k spread over (k − 1, k]: at a scale of 1, rounding up gives Zipf's k.

    Without the spread, lengths would be multiples of the scale, and what a last block wastes would
    hang on whether the block size divides it. The survival is a table, and above it its integral
    from k + ½, which is exact to 1e-7 there: numpy's own sampler is four times slower.
    """
    import numpy as np

    a = given.params["a"]
    k = np.arange(1, _ZIPF_TABLE + 1, dtype=np.float64)
    tail = math.pow(_ZIPF_TABLE + 0.5, 1 - a) / (a - 1)
    above = np.append(np.cumsum((k**-a)[::-1])[::-1] + tail, tail)  # Σ of j^−a over j > 0, 1, 2, …
    heights = np.log(above[0]) - np.log(above)
    with np.errstate(over="ignore"):
        far = np.exp((e - np.log(above[0] * (a - 1))) / (a - 1)) - 0.5
    near = np.interp(e, heights, np.append(0.0, k))
    x: Floats = np.where(e < heights[-1], near, far)
    return x


def _exp(factor: Callable[[Mapping[str, float]], float]) -> Callable[[Floats, Given], Floats]:
    def unit(x: Floats, given: Given) -> Floats:
        import numpy as np

        with np.errstate(over="ignore"):
            result: Floats = np.exp(x * factor(given.params))
        return result

    return unit


def _uniform_range(given: Given, where: str) -> tuple[int, float] | None:
    low, high = given.params.get("low"), given.params.get("high")
    if low is None and high is None:
        return None
    if low is None or high is None or low > high:
        raise usage_error(
            f"{where} is no range", "give both ends, uniform:low=1,high=1024, or neither and a mean"
        )
    return int(low), high - low + 1


def _fixed_range(given: Given, where: str) -> tuple[int, float] | None:
    return (1, given.params["tokens"]) if given.params else None


_NORMAL = Source(lambda rng, count, _: rng.standard_normal(count), _normal_pilot)
_EXPONENTIAL = Source(lambda rng, count, _: rng.standard_exponential(count), _exponential_pilot)
_GAMMA = Source(
    lambda rng, count, given: rng.standard_gamma(given.params["shape"], count), _gamma_pilot
)
_EVEN = Source(lambda rng, count, _: rng.random(count), _even_pilot)
_ONE = Source(lambda rng, count, _: _ones(count), lambda _: (_ones(1), _ones(1)))
_FILE = Source(_file_draw, _file_pilot)
_TOKENS = Parameter(1, MAX_COUNT, whole=True)

DISTRIBUTIONS: dict[str, Distribution] = {
    "zipf": Distribution(_EXPONENTIAL, _zipf, {"a": Parameter(1.01, 20, 1.6)}),
    "lognormal": Distribution(
        _NORMAL, _exp(lambda given: given["sigma"]), {"sigma": Parameter(1e-3, 10, 1.0)}
    ),
    "uniform": Distribution(
        _EVEN, parameters={"low": _TOKENS, "high": _TOKENS}, own_range=_uniform_range
    ),
    "fixed": Distribution(_ONE, parameters={"tokens": _TOKENS}, own_range=_fixed_range),
    "exponential": Distribution(_EXPONENTIAL),
    # The tokens until an end that has the same chance after each: an exponential, rounded up.
    "geometric": Distribution(_EXPONENTIAL),
    "gamma": Distribution(_GAMMA, parameters={"shape": Parameter(0.1, 1000, 2.0)}),
    "pareto": Distribution(
        _EXPONENTIAL, _exp(lambda given: 1 / given["alpha"]), {"alpha": Parameter(0.05, 1000, 2.5)}
    ),
    "empirical": Distribution(_FILE, _file_unit, own_range=lambda _, __: (1, 1.0)),
}
"""By the name that is typed; `empirical` takes a file, `fixed` its number without a name."""
