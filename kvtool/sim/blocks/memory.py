"""What an admission, a running request and its end ask of memory, compiled: a table of functions a kind.

numba compiles each entry of kvtool.sim.blocks.kernel with one table, so that no step looks one up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvtool.jit import part
from kvtool.sim.blocks import naming, radix, tables
from kvtool.sim.blocks.sorting import sort_waiting


class Memory(NamedTuple):
    """The functions of a kind of memory; each gets the state, then what it is about."""

    available: Any
    """Blocks that can be had now."""
    has_records: Any
    """Whether there is room to write down so many blocks more; if not, it is asked for."""
    name: Any
    """The names that follow are of this request."""
    look_up: Any
    """Of the first blocks of a request, at most so many, those that are cached; NONE: no room for names.
    It gets `name` before the request."""
    forget: Any
    """A request waits no longer: its names are not kept."""
    has_room: Any
    """R8: whether a request can have so many blocks, those that were found among them."""
    hold: Any
    """R11: a request that is admitted begins with the blocks that were found."""
    take: Any
    """R11: so many blocks more for a request."""
    schedule: Any
    """R12: so many tokens of a request are known once this step is done."""
    compute: Any
    """The output of its step is processed, and a request has ended or goes on."""
    release: Any
    """R15: finished or preempted, it gives its blocks back."""
    sort: Any
    """The queue gets its order for this step. It gets `look_up` and `name`."""


@part
def _keep_order(s: Any, look_up: Any, name: Any) -> None:
    """By arrival or priority it has its order always."""


HASHED = Memory(
    available=tables.available, has_records=tables.has_records, name=naming.name_head,
    look_up=tables.look_up, forget=naming.keep_names, has_room=tables.has_room, hold=tables.share, take=tables.take, schedule=tables.register,
    compute=tables.compute, release=tables.release, sort=_keep_order,
)  # fmt: skip
HASHED_SORTED = HASHED._replace(name=naming.name_row, forget=naming.drop_row, sort=sort_waiting)
RADIX = Memory(
    available=radix.available, has_records=radix.has_records, name=naming.name_row,
    look_up=radix.look_up, forget=naming.drop_row, has_room=radix.has_room, hold=radix.hold, take=radix.take, schedule=radix.schedule,
    compute=radix.compute, release=radix.release, sort=sort_waiting,
)  # fmt: skip
