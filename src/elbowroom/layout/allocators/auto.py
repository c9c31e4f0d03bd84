"""The default: the best of many orders, and then a search for a better one.

Up to some thousands of buffers the search goes on until nothing can be smaller or its work is done. Of more, the large
ones are searched and the small ones put between them. What the other members find, this one finds too, up to 50,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.fitting import fit
from elbowroom.layout.instance import Instance, finish, make_instance
from elbowroom.layout.ladder import Found, Ladder, measure, search_large
from elbowroom.layout.orders import find_areas, find_durations, find_pressures, order_by

MOST_SEARCHED = 2000
"""Up to so many buffers all are searched."""

MOST_COMPARED = 50_000
"""Of more, one order takes so long that only the largest first is tried."""

WORK, WORK_TIMES_BUFFERS = 1_800_000_000, 600_000_000_000
"""What the search may take, in units of 3 nanoseconds, more or less: the fewer buffers, the sooner it is worth it."""

LARGE_WORK, LARGE_WORK_PER_BUFFER, LARGE_WORK_PER_PAIR = 2_500_000_000, 50_000, 8
"""What it may take for the large ones of many."""


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`.

    Cost: quadratic in the number of buffers, for each order; the search is bounded by its work.
    """
    instance = make_instance(buffers, capacity_bytes)
    offsets = fit(instance, order_by(instance, instance.nbytes))
    found = Found(offsets, measure(instance, offsets), instance.bound_bytes - 1)
    is_small = len(buffers) <= MOST_SEARCHED
    if not is_small:
        search_large(
            instance,
            found,
            min(LARGE_WORK, len(buffers) * max(LARGE_WORK_PER_BUFFER, LARGE_WORK_PER_PAIR * len(buffers))),
        )
    for order, best in _list_orders(instance) if len(buffers) <= MOST_COMPARED else ():
        if found.arena_bytes <= instance.bound_bytes:
            break
        found.keep(fit(instance, order, best=best), instance.nbytes)
    is_optimal = found.arena_bytes <= found.refuted_bytes + 1
    if is_small and not is_optimal:
        ladder = Ladder(instance, found)
        ladder.climb(min(WORK, WORK_TIMES_BUFFERS // len(buffers)))
        is_optimal = ladder.is_done
    return finish(instance, found.offsets, capacity_bytes, is_optimal=is_optimal)


def _list_orders(instance: Instance) -> Iterator[tuple[Any, bool]]:
    """Orders, and whether into the smallest gap; those of the other members first, by size alone excepted."""
    areas, durations = find_areas(instance), find_durations(instance)
    yield order_by(instance), False
    yield order_by(instance, areas), False
    yield order_by(instance, instance.nbytes), True
    if len(areas) > MOST_SEARCHED:
        return
    yield order_by(instance), True
    yield order_by(instance, instance.nbytes, durations), False
    yield order_by(instance, areas), True
    yield order_by(instance, durations, instance.nbytes), True
    yield order_by(instance, find_pressures(instance), np.asarray(durations), areas), False
