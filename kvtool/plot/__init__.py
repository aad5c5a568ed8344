"""Pictures as PNG and SVG: matplotlib without pyplot, the same bytes for the same picture."""

from __future__ import annotations

import io
import warnings

from kvtool.errors import missing_matplotlib
from kvtool.plot import lines, panels
from kvtool.plot.style import STYLE
from kvtool.view import Chart, Charts, Panels

SIZE = (8, 4.8)


def draw(picture: Chart | Charts | Panels, format: str) -> bytes:
    """The bytes of a picture; `format` is png or svg."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_matplotlib() from error

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a matplotlibrc of the user's must not change the picture
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=SIZE, layout="constrained")
        if isinstance(picture, Chart):
            lines.fill(figure, picture)
        elif isinstance(picture, Charts):
            figure.set_size_inches(SIZE[0], SIZE[1] * len(picture.charts))
            parts = figure.subfigures(len(picture.charts), 1, squeeze=False)
            for part, chart in zip(parts[:, 0], picture.charts, strict=True):
                lines.fill(part, chart)
            if picture.title:
                figure.suptitle(picture.title, x=0.01, ha="left", fontsize=10)
        else:
            panels.fill(figure, picture)
        out = io.BytesIO()
        metadata = {"Date": None} if format == "svg" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a name in a script that the font lacks
            figure.savefig(out, format=format, dpi=160, metadata=metadata)
    return out.getvalue()
