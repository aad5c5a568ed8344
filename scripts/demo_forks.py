"""Two forks of one prompt in the real block pool: they cost no block until they diverge.

python scripts/demo_forks.py
"""

from __future__ import annotations

from kvtool.sim.block_pool import BlockPool


def line(pool: BlockPool, what: str) -> str:
    """What has been done, the blocks in use, and each sequence's block table."""
    tables = "  ".join(f"{name} {list(table)}" for name, table in pool.owners())
    return f"{what:<46} {pool.num_blocks - pool.num_free:>2} blocks   {tables}"


def main() -> None:
    """A prompt of 40 tokens in blocks of 16, two forks, and a token for each."""
    pool = BlockPool(num_blocks=12, block_size=16)
    pool.allocate("a", 40)
    print(line(pool, "a: a prompt of 40 tokens, blocks of 16"))
    for child in ("b", "c"):
        pool.fork("a", child)
        print(line(pool, f"{child}: a fork of a"))
    for name in ("b", "c", "a"):
        copy = pool.append(name)
        how = f"block {copy.source} is copied to {copy.target}" if copy else "in place: alone there"
        print(line(pool, f"{name} appends a token, {how}"))
    for name in ("a", "b", "c"):
        pool.free(name)
    print(line(pool, "all three are freed"))


if __name__ == "__main__":
    main()
