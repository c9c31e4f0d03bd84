"""The default: the best of many orders, and then a search for a better one.

What other members make in one go, this one makes, too, and more; so none of them is ever better. Up to some thousands
of buffers the search goes on until nothing can be smaller or its work is done. Of more, the large ones are searched and
the small ones put between them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.capacity_search import MOST, BestLayout, CapacitySearch, search_large
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS, list_others

WORK, WORK_TIMES_BUFFERS = 1_000_000_000, 600_000_000_000
"""What the search may take, in units of about 5 nanoseconds: five seconds, half of what anybody is asked to wait for
a few hundred buffers; and for steps of thousands of buffers, where the first layouts are good already, less: half a
second for 5,000."""

LARGE_WORK, LARGE_WORK_PER_BUFFER = 1_000_000_000, 25_000
"""What it may take for the large ones of many: five seconds, and for 10,000 buffers one and a quarter."""

FEW, NEAR = 1500, 1.0001
"""Of more buffers nothing better than so many times the bound is searched for: it would cost seconds, and nobody would
see it."""


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`.

    Cost: some tens of microseconds a buffer, and the search, which is bounded by its work.
    """
    instance = make_instance(buffers, capacity_bytes)
    found = BestLayout(instance.pinned, np.iinfo(np.int64).max, instance.bound_bytes - 1)
    for place in MEMBERS.values():
        try:
            found.keep(place(instance), instance.nbytes)
        except UsageError:
            continue  # it does not take such buffers
        if found.arena_bytes <= instance.bound_bytes:
            return finish(instance, found.offsets, capacity_bytes, is_optimal=True)
    for offsets in list_others(instance):
        found.keep(offsets, instance.nbytes)
        if found.arena_bytes <= instance.bound_bytes:
            return finish(instance, found.offsets, capacity_bytes, is_optimal=True)
    if len(buffers) > FEW and found.arena_bytes <= NEAR * instance.bound_bytes:
        return finish(instance, found.offsets, capacity_bytes)
    if len(buffers) > MOST:
        search_large(instance, found, min(LARGE_WORK, len(buffers) * LARGE_WORK_PER_BUFFER))
        return finish(instance, found.offsets, capacity_bytes)
    ladder = CapacitySearch(instance, found)
    ladder.climb(min(WORK, WORK_TIMES_BUFFERS // len(buffers)))
    return finish(instance, found.offsets, capacity_bytes, is_optimal=ladder.is_done)
