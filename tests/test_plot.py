from __future__ import annotations

import re
import struct
import sys
from dataclasses import replace

import pytest

from kvtool.errors import KvtoolError
from kvtool.plot import draw
from kvtool.view import Chart, Line

pytest.importorskip("matplotlib")

CONTEXTS = tuple(float(1024 * 2**power) for power in range(8))
CHART = Chart(
    title="KV cache by context",
    x_label="context (tokens)",
    y_label="KV cache (bytes)",
    lines=(
        Line(name="bf16", x=CONTEXTS, y=tuple(2.0**21 * x for x in CONTEXTS)),
        Line(name="fp8", x=CONTEXTS, y=tuple(2.0**20 * x for x in CONTEXTS)),
    ),
    levels=(("A100 80 GB", 79e9), ("H100 80 GB", 80e9), ("H200", 141e9)),
)


def texts(chart: Chart) -> list[str]:
    """The texts of the picture in drawing order: matplotlib leaves each as a comment in the SVG."""
    return re.findall(r"<!-- (.*?) -->", draw(chart, "svg").decode())


def test_a_png_has_the_promised_size() -> None:
    picture = draw(CHART, "png")
    assert picture.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", picture[16:24]) == (1280, 768)


@pytest.mark.parametrize("format", ["svg", "png"])
def test_the_same_chart_is_the_same_bytes(format: str) -> None:
    assert draw(CHART, format) == draw(CHART, format)


def test_a_svg_does_not_say_when_it_was_made() -> None:
    assert b"dc:date" not in draw(CHART, "svg")


def test_bytes_and_tokens_have_binary_ticks() -> None:
    shown = texts(CHART)
    assert {"0", "32k", "64k", "128k"} <= set(shown)
    assert {"0 B", "64 GiB", "128 GiB", "256 GiB"} <= set(shown)
    assert "KV cache" in shown
    assert "KV cache (bytes)" not in shown  # the ticks say GiB
    assert "context (tokens)" in shown


def test_logarithmic_axes_have_powers_of_two() -> None:
    shown = set(texts(replace(CHART, log_x=True, log_y=True)))
    assert {"1k", "2k", "4k", "8k", "16k", "32k", "64k", "128k"} <= shown
    assert {"1 GiB", "2 GiB", "4 GiB", "128 GiB"} <= shown


def test_other_axes_are_decimal() -> None:
    line = Line(name="LRU", x=(0.0, 100_000.0), y=(0.0, 1.0))
    shown = texts(Chart(title="t", x_label="blocks", y_label="hit rate", lines=(line,)))
    assert {"20,000", "100,000", "0.2", "1"} <= set(shown)


def test_lines_and_levels_are_named() -> None:
    assert {"bf16", "fp8", "A100 80 GB", "H100 80 GB", "H200"} <= set(texts(CHART))


def height(picture: bytes) -> int:
    found: tuple[int, int] = struct.unpack(">II", picture[16:24])
    return found[1]


def test_many_names_stand_below_the_axes() -> None:
    def chart(count: int) -> Chart:
        lines = [Line(name=f"n{i}", x=CONTEXTS, y=CONTEXTS) for i in range(count)]
        return replace(CHART, lines=tuple(lines))

    assert height(draw(chart(6), "png")) == 768
    assert height(draw(chart(7), "png")) > 768
    assert height(draw(chart(40), "png")) > height(draw(chart(7), "png"))
    shown = texts(chart(10))
    assert {f"n{i}" for i in range(10)} <= set(shown)
    assert shown.index("n0") > shown.index("context (tokens)")


def test_a_name_is_text_whatever_it_holds(recwarn: pytest.WarningsRecorder) -> None:
    names = ("$x^2$", "a$\\frac{$", "_hidden", "中文")
    lines = tuple(Line(name=name, x=(1.0, 2.0), y=(3.0, 4.0)) for name in names)
    shown = texts(Chart(title="$t$", x_label="x", y_label="y", lines=lines))
    assert {"$t$", *names} <= {text.strip() for text in shown}
    assert not recwarn.list


def test_names_of_near_levels_do_not_touch() -> None:
    picture = draw(CHART, "svg").decode()
    heights = [
        float(re.search(rf"<!-- {name} -->\s*<g [^>]*translate\([\d.]+ ([\d.]+)\)", picture)[1])  # type: ignore[index]
        for name in ("A100 80 GB", "H100 80 GB", "H200")
    ]
    assert heights[0] - heights[1] > 9  # points; the text is 9 high and y grows downwards
    assert heights[1] - heights[2] > 9


def test_equal_levels_share_one_name() -> None:
    levels = (("b200", 1e9), ("a100", 8e10), ("h100", 8e10))
    shown = texts(replace(CHART, levels=levels))
    assert "a100, h100" in shown
    assert "h100" not in shown


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("y", [(0.0,), (5.0,), (100_000.0,)])
def test_a_single_point_can_be_drawn(log: bool, y: tuple[float, ...]) -> None:
    line = Line(name="", x=(5000.0,), y=y)
    chart = Chart(
        title="one", x_label="tokens", y_label="bytes", lines=(line,), log_x=log, log_y=log
    )
    assert "tokens" in texts(chart)


def test_without_matplotlib_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KvtoolError) as caught:
        draw(CHART, "png")
    assert caught.value.hint == "pip install 'kvtool[plot]'"


def test_a_matplotlibrc_does_not_change_the_picture() -> None:
    import matplotlib

    expected = draw(CHART, "svg")
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "black"}):
        assert draw(CHART, "svg") == expected


@pytest.mark.parametrize(("high", "named"), [(90.0, "2 3 4 5 6 7 8 9"), (900.0, "2 5"), (1e5, "")])
def test_what_lies_between_powers_of_ten_is_named_in_plain_numbers(high: float, named: str) -> None:
    pytest.importorskip("matplotlib")
    from kvtool.plot.lines import _between

    name = _between(10.0, high)
    found = [name(10.0 * part, None) for part in range(2, 10)]
    assert " ".join(one[0] for one in found if one) == named
    assert not any("$" in one for one in found)
