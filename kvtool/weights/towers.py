"""What stands around a language model: vision and audio towers, and what projects into it."""

from __future__ import annotations

from kvtool.weights.pieces import Whole

TOWERS: dict[str, tuple[Whole, ...]] = {}
"""Outermost model type → what stands beside its language model."""
