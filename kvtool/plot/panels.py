"""Small pictures below each other: stacked bars, shares over time, strips of memory."""

from __future__ import annotations

from typing import Any

from kvtool.plot.style import GREY, PALETTE
from kvtool.view import Areas, Bars, Panels, Strip

WIDTH, RIGHT, HEAD, FOOT = 9.0, 0.25, 0.75, 0.55
"""Inches: of the figure; right of the axes; above the first panel; below the last one."""
TITLE, LEGEND_ROW = 0.3, 0.23
BAR_HEIGHT, AREA_HEIGHT, STRIP_HEIGHT = 0.28, 1.0, 0.55
"""Inches of a panel's title, of a third row of names, of a bar, of a panel of areas and of a strip of memory."""
BELOW = {Bars: 0.6, Areas: 0.5, Strip: 0.12}
LETTER = 0.078
"""About the width of a letter of a bar's name, in inches."""
PARTS = (
    "#0072b2",
    "#56b4e9",
    "#d55e00",
    "#cc79a7",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#8c6bb1",
    "#a6761d",
)
REST = "#ececec"
"""Shares in their order, the last one of what is left: blues are a request's own, warm colours are waste."""
DARK = (0, 2, 5, 7, 8)
"""Of these colours, those on which black cannot be read."""
BEYOND = "#b00020"
SMALL = 0.065
"""About the width of a letter in a bar or behind it, in inches."""
STRIP_LINES, STRIP_PIXELS = 4, 1200
"""A strip is long and thin: it is broken into lines, as text is."""


def fill(figure: Any, picture: Panels) -> None:
    """One axes for each panel, as high as it needs to be.

    Placed by hand: matplotlib's own layouts move by a billionth from run to run, and with them the
    names of the clips in an SVG.
    """
    heights = [_height(panel) for panel in picture.panels]
    named_parts = _legend(picture)
    columns = max(1, min(6, int(WIDTH / (0.6 + LETTER * max(map(len, named_parts), default=0)))))
    foot = FOOT + LEGEND_ROW * max(0, -(-len(named_parts) // columns) - 2)
    total = (
        HEAD
        + foot
        + sum(
            TITLE + height + BELOW[type(panel)]
            for panel, height in zip(picture.panels, heights, strict=True)
        )
    )
    figure.set_layout_engine("none")
    figure.set_size_inches(WIDTH, total)
    left = 0.75 + LETTER * max(map(len, _names(picture)), default=0)
    named: dict[str, Any] = {}
    top = total - HEAD
    for panel, height in zip(picture.panels, heights, strict=True):
        bottom = top - TITLE - height
        box = (left / WIDTH, bottom / total, (WIDTH - left - RIGHT) / WIDTH, height / total)
        axes = figure.add_axes(box)
        axes.set_title(panel.title, fontsize=10, pad=4)
        if isinstance(panel, Bars):
            named |= _bars(axes, panel)
        elif isinstance(panel, Areas):
            named |= _areas(axes, panel)
        else:
            _strip(axes, panel)
        top = bottom - BELOW[type(panel)]
    figure.text(0.1 / WIDTH, 1 - 0.3 / total, picture.title, fontweight="bold", fontsize=12)
    figure.legend(
        named.values(), named.keys(), loc="lower center", ncols=columns, frameon=False,
        bbox_to_anchor=(0.5, 0.05 / total),
    )  # fmt: skip


def _names(picture: Panels) -> list[str]:
    bars = [panel for panel in picture.panels if isinstance(panel, Bars)]
    return [name for panel in bars for name, _ in panel.rows]


def _legend(picture: Panels) -> dict[str, None]:
    """Names of all parts and limits, each once."""
    found: dict[str, None] = {}
    for panel in picture.panels:
        if not isinstance(panel, Strip):
            found |= dict.fromkeys(panel.parts)
        if isinstance(panel, Bars):
            found |= dict.fromkeys(name for name, _ in panel.limits)
    return found


def _height(panel: Bars | Areas | Strip) -> float:
    if isinstance(panel, Bars):
        return BAR_HEIGHT * len(panel.rows)
    return AREA_HEIGHT if isinstance(panel, Areas) else STRIP_HEIGHT


def _bars(axes: Any, panel: Bars) -> dict[str, Any]:
    names = [name for name, _ in panel.rows]
    left = [0.0] * len(names)
    handles = {}
    inches = axes.get_position().width * WIDTH
    end = _end(panel, inches)
    for part, name in enumerate(panel.parts):
        widths = [values[part] for _, values in panel.rows]
        place = panel.colours[part] if panel.colours else _place(part, len(panel.parts))
        colour = REST if place < 0 else PARTS[place % len(PARTS)]
        handles[name] = axes.barh(range(len(names)), widths, left=left, color=colour, height=0.75)
        for row, width in enumerate(widths):
            axes.text(
                left[row] + width / 2, row, _label(panel, row, part, inches / end), ha="center", va="center",
                fontsize=8, color="white" if place in DARK else "black",
            )  # fmt: skip
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for row, text in enumerate(panel.ends):
        axes.text(max(1.0, left[row]) + 0.01, row, text, va="center", fontsize=8, color=BEYOND)
    for (name, at), style in zip(panel.limits, ("--", ":"), strict=False):
        handles[name] = axes.axvline(at, color=BEYOND, linestyle=style, linewidth=1.4)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, end)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    return handles


def _end(panel: Bars, inches: float) -> float:
    """Of the axis: all of every bar, and of what stands behind it."""
    ends = panel.ends or ("",) * len(panel.rows)
    found = [1.0]
    for (_, values), text in zip(panel.rows, ends, strict=True):
        room = 1 - min(0.5, SMALL * (len(text) + 1) / inches) if text else 1.0
        found.append(max(1.0, sum(values)) / room)
    return max(found)


def _label(panel: Bars, row: int, part: int, inches: float) -> str:
    """What is said in a part of a bar: its own words, its share if there is no room for them, or nothing.

    `inches` are those of a whole, of which a bar may be more.
    """
    width = panel.rows[row][1][part]
    if not panel.labels:
        return f"{width:.0%}" if width >= 0.05 else ""
    said = (panel.labels[row][part], f"{width:.0%}")
    return next((text for text in said if width * inches >= SMALL * (len(text) + 1)), "")


def _place(part: int, count: int) -> int:
    """Among the colours: in the order of the parts, the last one being what is left."""
    return -1 if part == count - 1 else part


def _colour(part: int, count: int) -> str:
    place = _place(part, count)
    return REST if place < 0 else PARTS[place % len(PARTS)]


def _areas(axes: Any, panel: Areas) -> dict[str, Any]:
    colours = [_colour(part, len(panel.parts)) for part in range(len(panel.parts))]
    stack = axes.stackplot(panel.x, *panel.values, colors=colours, step="mid", linewidth=0)
    axes.set_xlim(panel.x[0], panel.x[-1] if panel.x[-1] > panel.x[0] else panel.x[0] + 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    return dict(zip(panel.parts, stack, strict=True))


def _strip(axes: Any, panel: Strip) -> None:
    """Lines of equal length below each other, as pixels: a pool may have a million blocks."""
    import numpy as np
    from matplotlib.colors import to_rgb

    full = np.array([to_rgb(colour) for colour in PALETTE[:-1]])
    pale = 1 - (1 - full) / 4
    pixels = np.ones((STRIP_LINES * STRIP_PIXELS, 3))
    scale = len(pixels) / panel.length
    for start, size, filled, owner in panel.pieces:
        ends = [round(at * scale) for at in (start, start + filled, start + size)]
        pixels[ends[1] : ends[2]] = pale[owner % len(full)]
        pixels[ends[0] : max(ends[1], ends[0] + (filled > 0))] = full[owner % len(full)]
    lines = pixels.reshape(STRIP_LINES, STRIP_PIXELS, 3)
    for line in range(STRIP_LINES):
        extent = (0.0, 1.0, line + 0.42, line - 0.42)
        axes.imshow(lines[line : line + 1], extent=extent, aspect="auto", interpolation="nearest")
        axes.barh(line, 1.0, height=0.84, fill=False, edgecolor=GREY, linewidth=0.6)
    axes.set_xlim(0, 1)
    axes.set_ylim(STRIP_LINES - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_xticks([])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
