"""kvtool bench decode: whole-model decode, by cache."""

from __future__ import annotations

EPILOG = ""


def decode() -> None:
    """Whole-model decode."""
