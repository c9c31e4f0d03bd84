"""The default allocator: the best of many greedy orders, then a search for a smaller arena.

It tries the layout of every greedy allocator, so none of them is ever better. Up to `MOST` buffers, the
search runs until the layout is proven optimal or its work limit is reached. With more, only the large buffers are
searched, and the small ones are placed in the gaps.
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
"""Work limit of the search, in units of about 5 ns: five seconds for a few hundred buffers. Less for thousands, whose
greedy layouts are good already: half a second for 5,000."""

LARGE_WORK, LARGE_WORK_PER_BUFFER = 1_000_000_000, 25_000
"""Work limit where only the large buffers are searched: at most five seconds; 1.25 seconds for 10,000 buffers."""

FEW, NEAR = 1500, 1.0001
"""With more than `FEW` buffers, a layout within `NEAR` times the bound is not searched further: it would cost seconds
for a negligible gain."""


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Assign an offset to every buffer; see `allocators`.

    Cost: some tens of microseconds per buffer, plus the search, whose work is bounded.
    """
    instance = make_instance(buffers, capacity_bytes)
    found = BestLayout(instance.pinned, np.iinfo(np.int64).max, instance.bound_bytes - 1)
    for place in MEMBERS.values():
        try:
            found.keep(place(instance), instance.nbytes)
        except UsageError:
            continue  # it does not support these buffers
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
    search = CapacitySearch(instance, found)
    search.climb(min(WORK, WORK_TIMES_BUFFERS // len(buffers)))
    return finish(instance, found.offsets, capacity_bytes, is_optimal=search.is_done)
