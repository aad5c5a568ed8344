"""A chart of lines: sizes against contexts, curves against capacities."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from kvtool.plot.style import GREY, PALETTE
from kvtool.units import KIB, format_bytes
from kvtool.view import Chart

if TYPE_CHECKING:
    from collections.abc import Callable

_UNIT = re.compile(r"\b(bytes|tokens)\b", re.IGNORECASE)
_MOST_INSIDE = 6
"""Lines whose legend still finds room between them; more are named below the axes."""
_LEGEND_WIDTH, _LEGEND_ROW = 110, 0.22  # letters across the picture; inches of a row of names
_LEVEL_GAP = 0.045  # of the height: less, and two labels touch


def fill(figure: Any, chart: Chart) -> None:
    """Lines and dashed levels on one pair of axes.

    An axis whose label says bytes has binary units on its ticks (GiB), one that says tokens has 8k.
    """
    axes = figure.add_subplot()
    _draw_lines(axes, chart)
    _scale(axes, "x", chart.x_label, log=chart.log_x)
    _scale(axes, "y", chart.y_label, log=chart.log_y)
    _name_levels(axes, chart)
    _name_lines(figure, axes, chart)
    axes.set_title(chart.title, pad=12)
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_lines(axes: Any, chart: Chart) -> None:
    seen = set()
    for index, line in enumerate(chart.lines):
        hides = (line.x, line.y) in seen  # another one: both must be seen
        seen.add((line.x, line.y))
        axes.plot(
            line.x,
            line.y,
            # matplotlib gives no legend to what starts with "_" or to nothing
            label=f" {line.name}" if line.name.startswith("_") else line.name or "_",
            color=PALETTE[index % len(PALETTE)],
            linestyle=("--" if hides or index >= len(PALETTE) else "-") if line.joined else "",
            linewidth=2,
            marker="o" if len(line.x) <= 24 or not line.joined else None,
            markersize=4 if line.joined else 7,
        )
    for _, y in chart.levels:
        axes.axhline(y, color=GREY, linestyle="--", linewidth=1.2)
    for name, x in chart.marks:
        axes.axvline(x, color=GREY, linestyle=":", linewidth=1.2)
        axes.annotate(
            name, (x, 1), xycoords=("data", "axes fraction"), xytext=(4, -3), color=GREY,
            textcoords="offset points", fontsize=9, va="top",
        )  # fmt: skip
    values = [y for line in chart.lines for y in line.y] + [y for _, y in chart.levels]
    if not chart.log_y and values and min(values) >= 0:
        axes.set_ylim(0, max(values) * 1.06 or 1)


def _name_lines(figure: Any, axes: Any, chart: Chart) -> None:
    names = [line.name for line in chart.lines if line.name]
    if not names:
        return
    if len(names) <= _MOST_INSIDE:
        axes.legend(frameon=False, loc="best")
        return
    columns = max(1, min(4, _LEGEND_WIDTH // (max(map(len, names)) + 8)))
    rows = -(-len(names) // columns)
    page = figure.figure or figure  # a part of a page has the page's height
    page.set_figheight(page.get_figheight() + _LEGEND_ROW * rows)  # the axes keep their height
    figure.legend(frameon=False, loc="outside lower center", ncols=columns, handlelength=3)


def _name_levels(axes: Any, chart: Chart) -> None:
    """Each level's name at the right edge; names of near levels are pushed apart upwards."""
    to_axes = axes.transData + axes.transAxes.inverted()
    floor = -math.inf
    names: dict[float, list[str]] = {}
    for name, y in chart.levels:
        names.setdefault(y, []).append(name)
    for y in sorted(names):
        height = max(float(to_axes.transform((1, y))[1]), floor)
        floor = height + _LEVEL_GAP
        text = ", ".join(names[y])
        axes.text(1.01, height, text, color=GREY, fontsize=9, va="center", transform=axes.transAxes)


def _scale(axes: Any, side: str, label: str, *, log: bool) -> None:
    """Label, scale and ticks of one axis, by the unit that its label names."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    match = _UNIT.search(label)
    unit = match[1].lower() if match else ""
    binary = unit in _TICK
    axis = getattr(axes, f"{side}axis")
    axis.set_label_text(label.replace(" (bytes)", ""))  # the ticks say GiB
    log = log and axis.get_data_interval()[1] > 0  # zeros alone have no logarithm
    if log:
        getattr(axes, f"set_{side}scale")("log", base=2 if binary else 10)
    low, high = sorted(axis.get_view_interval())
    if binary:
        ticks = _powers(low, high) if log else _multiples(low, high)
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: _TICK[unit](value)))
    else:  # matplotlib's own would be 10^2 in a mathematics that is off
        plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
        axis.set_major_formatter(plain)
        if log:
            axis.set_minor_formatter(_between(low, high))


def _between(low: float, high: float) -> Any:
    """Names of what lies between powers of ten: all within one, 2 and 5 within three, else none."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    if high >= 1000 * low:
        return NullFormatter()
    named = "123456789" if high < 10 * low else "25"
    return FuncFormatter(lambda value, _: f"{value:,.10g}" if f"{value:e}"[0] in named else "")


def _multiples(low: float, high: float) -> list[float]:
    """At most nine ticks, a power of two apart, so that every one is a round binary number."""
    step = 2.0 ** math.ceil(math.log2((high - low) / 8)) if high > low else 1.0
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """At most nine powers of two between the ends of a logarithmic axis."""
    if not 0 < low * 2 <= high:
        return _multiples(low, high)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    return [2.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / 9))]


def _byte_tick(value: float) -> str:
    return format_bytes(round(value)).replace(".00 ", " ")


def _token_tick(value: float) -> str:
    for size, suffix in ((KIB**2, "M"), (KIB, "k")):
        if abs(value) >= size and (value * 4 / size).is_integer():
            return f"{value / size:g}{suffix}"
    return f"{value:,.10g}"


_TICK: dict[str, Callable[[float], str]] = {"bytes": _byte_tick, "tokens": _token_tick}
