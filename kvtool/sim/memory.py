"""What holds a request's tokens, plainly: blocks of a pool, or one region that is reserved for it.

`reservation` says how many slots a contiguous allocator asks for; Yu et al., "Orca", OSDI 2022, and
the baselines of the vLLM paper (section 6.1: Orca (Max), (Pow2), (Oracle)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvtool.sim.block_pool import BlockPool
from kvtool.sim.placement import Placement, placement, round_up_to_power
from kvtool.sim.settings import Settings

PAGED, STATIC_BATCH = "paged", "static-batch"
CONTIGUOUS = ("max", "pow2", "oracle", "grow")
ALLOCATORS = (PAGED, *CONTIGUOUS, STATIC_BATCH)
BUDDY = "buddy"
PLACEMENTS = (BUDDY, "first-fit", "best-fit")
SMALLEST_REGION = 16
"""Slots that `grow` begins with at least."""


@dataclass(slots=True)
class Request:
    """A request as the scheduler sees it. `final_tokens` is the most that it will ever cache."""

    index: int
    prompt_tokens: int
    output_tokens: int
    final_tokens: int
    generated: int = 0
    computed: int = 0

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens; the last one is not cached before it is fed."""
        return self.prompt_tokens + self.generated


class Memory(Protocol):
    """Where tokens are held. A call that finds no room answers False and changes nothing."""

    def can_admit(self, request: Request, num_tokens: int, *, alone: bool) -> bool:
        """Whether a waiting request may start with so many tokens; `alone`: nothing runs."""

    def hold(self, request: Request, num_tokens: int) -> bool:
        """Make room for so many tokens of a request in all."""

    def release(self, request: Request) -> None:
        """Free everything of a request."""

    def held_slots(self, request: Request) -> int:
        """Slots that are the request's, used or not."""

    def used_slots(self) -> int:
        """Slots that are anybody's."""


class Paged:
    """Blocks on demand. `can_admit` is vLLM's check of an admission (rules R8 and R9)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.num_blocks, settings.block_size)

    def can_admit(self, request: Request, num_tokens: int, *, alone: bool) -> bool:
        """Enough free blocks for the whole prompt so far, or for these tokens alone."""
        settings = self.settings
        if settings.reserve_full_prompt:
            num_tokens = request.num_tokens
        needed = self.pool.blocks_for(min(num_tokens, settings.max_model_len))
        return needed + (0 if alone else settings.watermark_blocks) <= self.pool.num_free

    def hold(self, request: Request, num_tokens: int) -> bool:
        """Append blocks as the last one fills up."""
        pool, key = self.pool, request.index
        have = pool.num_tokens(key) if key in pool else 0
        if pool.blocks_for(num_tokens) - pool.blocks_for(have) > pool.num_free:
            return False
        if key in pool:
            pool.append(key, num_tokens - have)
        else:
            pool.allocate(key, num_tokens)
        return True

    def release(self, request: Request) -> None:
        """Free the blocks of the table."""
        if request.index in self.pool:
            self.pool.free(request.index)

    def held_slots(self, request: Request) -> int:
        """Slots of the blocks in the table."""
        return len(self.pool.block_table(request.index)) * self.pool.block_size

    def used_slots(self) -> int:
        """Slots of all blocks in tables."""
        return (self.pool.num_blocks - self.pool.num_free) * self.pool.block_size


class Contiguous:
    """One region a request, of the size that the policy reserves."""

    def __init__(self, policy: str, where: str, settings: Settings) -> None:
        self.policy = policy
        self.settings = settings
        self.placement: Placement = placement(where, settings.num_slots)
        self.regions: dict[int, tuple[int, int]] = {}
        self.copied_tokens = 0

    def can_admit(self, request: Request, num_tokens: int, *, alone: bool) -> bool:
        """Whether a hole takes the reservation: tried, and undone."""
        found = self.placement.allocate(reservation(self.policy, request, self.settings))
        if found is None:
            return False
        self.placement.free(found[0])
        return True

    def hold(self, request: Request, num_tokens: int) -> bool:
        """The reservation at first; `grow` then doubles: in place, or by a copy to another hole."""
        region = self.regions.get(request.index)
        if region is None:
            found = self.placement.allocate(reservation(self.policy, request, self.settings))
            if found is None:
                return False
            self.regions[request.index] = found
            return True
        address, size = region
        if num_tokens <= size:
            return True
        wanted = min(2 * size, self.settings.max_model_len)
        larger = self.placement.extend(address, wanted)
        if larger is not None:
            self.regions[request.index] = (address, larger)
            return True
        moved = self.placement.allocate(wanted)  # the old region is held until the copy is done
        if moved is None:
            return False
        self.placement.free(address)
        self.copied_tokens += request.computed
        self.regions[request.index] = moved
        return True

    def release(self, request: Request) -> None:
        """Leave a hole."""
        region = self.regions.pop(request.index, None)
        if region is not None:
            self.placement.free(region[0])

    def held_slots(self, request: Request) -> int:
        """The size of the region."""
        return self.regions[request.index][1]

    def used_slots(self) -> int:
        """The sizes of all regions."""
        return sum(size for _, size in self.regions.values())


def reservation(policy: str, request: Request, settings: Settings) -> int:
    """Slots that a contiguous allocator asks for when a request starts."""
    longest = settings.max_model_len
    if policy == "max":
        return longest
    if policy == "pow2":  # vLLM paper: the output is over-reserved by at most 2x
        return min(request.prompt_tokens + round_up_to_power(request.output_tokens), longest)
    if policy == "oracle":
        return request.final_tokens
    return min(max(SMALLEST_REGION, round_up_to_power(request.num_tokens + 1)), longest)


def memory(allocator: str, where: str, settings: Settings) -> Memory:
    """The plain memory of an allocator; `where` is the placement of a contiguous one."""
    return Paged(settings) if allocator == PAGED else Contiguous(allocator, where, settings)
