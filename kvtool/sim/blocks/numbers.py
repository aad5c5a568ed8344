"""Numbers that stand for words in the records of kvtool.sim.blocks."""

from __future__ import annotations

NONE = -1
NO_NAME = 0
"""Of a block that cannot be found."""
END, FRESH = 0, 1
"""Records of blocks that are none: the end of the free list, and all blocks never taken."""
ROOT = 0
"""Of a radix tree: the node of the empty prefix."""
MOST_SORTED = 128
"""SGLang: where more wait, the queue is not sorted by what is cached."""
FEW_TOKENS, ALIKE_TOKENS = 32, 32
"""Who found at most so many tokens is put last if it begins with so many of one before it."""
