"""Layouts that are made in one go: each a function from an instance to offsets. Allocators have them one by one, the
default has the best of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from elbowroom.errors import UsageError
from elbowroom.layout.greedy import fit_in_order
from elbowroom.layout.instance import Instance, select
from elbowroom.layout.orders import find_areas, find_durations, find_pressures, order_by

Array = Any


def place_by_size(instance: Instance) -> Array:
    """The largest buffer first, each at the lowest offset that has room."""
    return fit_in_order(instance, order_by(instance, instance.nbytes))


def place_by_area(instance: Instance) -> Array:
    """The buffer with the most bytes times lifetime first, each at the lowest offset that has room."""
    return fit_in_order(instance, order_by(instance, find_areas(instance)))


def place_by_time(instance: Instance) -> Array:
    """As they come into being, each at the lowest offset that has room."""
    return fit_in_order(instance, order_by(instance))


def place_in_smallest_gaps(instance: Instance) -> Array:
    """The largest first, each into the smallest gap that has room; what crosses the iteration has a region of its own.

    Raises:
        UsageError: some cross the iteration and some are pinned, which the regions have no place for.
    """
    crossing, inside = np.flatnonzero(instance.wrap > 0), np.flatnonzero(instance.wrap == 0)
    if not len(crossing):
        return fit_in_order(instance, order_by(instance, instance.nbytes), best=True)
    if (instance.pinned >= 0).any():
        raise UsageError(
            "best_fit keeps two regions for buffers that cross the iteration, beside which nothing can be pinned; "
            "choose another allocator"
        )
    offsets = np.zeros(len(instance.nbytes), np.int64)
    region = 0
    for chosen in (crossing, inside):
        part = select(instance, chosen)
        offsets[chosen] = fit_in_order(part, order_by(part, part.nbytes), best=True)
        if chosen is crossing:
            region = int((offsets[chosen] + part.nbytes).max())
            continue
        unit = int(np.lcm.reduce(np.unique(part.alignment))) if len(chosen) else 1
        offsets[chosen] += -(-2 * region // unit) * unit
    return offsets


MEMBERS: dict[str, Callable[[Instance], Array]] = {
    "greedy_by_size": place_by_size,
    "best_fit": place_in_smallest_gaps,
    "first_fit": place_by_time,
    "greedy_by_area": place_by_area,
}
"""What allocators of these names do, and all of it what the default tries, for any number of buffers."""


def list_others(instance: Instance) -> Iterator[Array]:
    """Layouts in further orders, which no allocator has; each is made when it is asked for."""
    nbytes, lengths = instance.nbytes, instance.lengths
    durations, pressures = find_durations(instance), find_pressures(instance)
    yield fit_in_order(instance, order_by(instance, pressures, durations, find_areas(instance)))
    yield fit_in_order(instance, order_by(instance, pressures, lengths, nbytes), best=True)
    yield fit_in_order(instance, order_by(instance, lengths, nbytes), best=True)
    yield fit_in_order(instance, order_by(instance, nbytes, durations))
    yield fit_in_order(instance, order_by(instance), best=True)
