"""The smallest arena, proven to be so where the search comes to an end: `is_optimal` says whether it did."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.capacity_search import BestLayout, CapacitySearch
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import place_by_size


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None, *, most_work: int = 6_000_000_000) -> Layout:
    """Offsets of all buffers; see `allocators`.

    Args:
        most_work: when to give up the proof; 5 nanoseconds each, more or less.

    Cost: exponential in the number of buffers, and quadratic in memory.
    """
    instance = make_instance(buffers, capacity_bytes)
    found = BestLayout(instance.pinned, np.iinfo(np.int64).max, instance.bound_bytes - 1)
    found.keep(place_by_size(instance), instance.nbytes)
    ladder = CapacitySearch(instance, found)
    ladder.climb(most_work)
    return finish(instance, found.offsets, capacity_bytes, is_optimal=ladder.is_done)
