"""Numbers that stand for words in the records of kvtool.sim.blocks."""

from __future__ import annotations

NONE = -1
NO_NAME = 0
"""Of a block that cannot be found."""
END, FRESH = 0, 1
"""Records of blocks that are none: the end of the free list, and all blocks never taken."""
