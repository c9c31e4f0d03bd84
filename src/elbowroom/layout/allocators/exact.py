"""Search for the smallest arena. `is_optimal` tells whether the search finished, which proves the optimum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.capacity_search import BestLayout, CapacitySearch
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import place_by_size


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None, *, most_work: int = 6_000_000_000) -> Layout:
    """Assign an offset to every buffer; see `allocators`.

    Args:
        most_work: work limit of the search, in units of about 5 ns.

    Cost: exponential in the number of buffers, and quadratic memory.
    """
    instance = make_instance(buffers, capacity_bytes)
    found = BestLayout(instance.pinned, np.iinfo(np.int64).max, instance.bound_bytes - 1)
    found.keep(place_by_size(instance), instance.nbytes)
    search = CapacitySearch(instance, found)
    search.climb(most_work)
    return finish(instance, found.offsets, capacity_bytes, is_optimal=search.is_done)
