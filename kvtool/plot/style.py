"""What every picture has in common: colours, fonts, and nothing that changes from run to run."""

from __future__ import annotations

from typing import Any

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's colours: told apart by colour-blind readers too."""

GREY = "#6b6b6b"
STYLE: dict[Any, Any] = {
    "text.parse_math": False,  # a $ in a model's name is a dollar
    "svg.hashsalt": "kvtool",  # without it every file gets its own random ids
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
