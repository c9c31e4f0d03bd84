"""Greedy layouts: functions from an instance to offsets. Some are allocators of their own; the default allocator takes
the best of all.
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
    """Place the largest buffer first, each at the lowest offset that fits."""
    return fit_in_order(instance, order_by(instance, instance.nbytes))


def place_by_area(instance: Instance) -> Array:
    """Place the largest bytes x lifetime first, each at the lowest offset that fits."""
    return fit_in_order(instance, order_by(instance, find_areas(instance)))


def place_by_time(instance: Instance) -> Array:
    """Place buffers in order of allocation, each at the lowest offset that fits."""
    return fit_in_order(instance, order_by(instance))


def place_in_smallest_gaps(instance: Instance) -> Array:
    """Place the largest buffer first, each in the smallest gap that fits; buffers that wrap get a region of their own.

    Raises:
        UsageError: some buffers wrap and others are pinned, which the regions do not support.
    """
    crossing, inside = np.flatnonzero(instance.wrap > 0), np.flatnonzero(instance.wrap == 0)
    if not len(crossing):
        return fit_in_order(instance, order_by(instance, instance.nbytes), best=True)
    if (instance.pinned >= 0).any():
        raise UsageError(
            "best_fit cannot combine pinned buffers with buffers that cross the iteration; choose another allocator"
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
"""Greedy layouts by allocator name; the default allocator tries them all, for any number of buffers."""


def list_others(instance: Instance) -> Iterator[Array]:
    """Generate layouts by further orders, which are not available as allocators."""
    nbytes, lengths = instance.nbytes, instance.lengths
    durations, pressures = find_durations(instance), find_pressures(instance)
    yield fit_in_order(instance, order_by(instance, pressures, durations, find_areas(instance)))
    yield fit_in_order(instance, order_by(instance, pressures, lengths, nbytes), best=True)
    yield fit_in_order(instance, order_by(instance, lengths, nbytes), best=True)
    yield fit_in_order(instance, order_by(instance, nbytes, durations))
    yield fit_in_order(instance, order_by(instance), best=True)
