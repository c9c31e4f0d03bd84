"""Orders to place buffers in, and their sort keys. Ties are broken by begin of lifetime, then by index."""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._numba_loops import compiled
from elbowroom.layout.instance import Instance

Array = Any


def order_by(instance: Instance, *keys: Array) -> Array:
    """Sort buffers by these keys, largest first; return their indices."""
    lower = np.array([buffer.lower for buffer in instance.buffers], np.int64)
    return np.lexsort((np.arange(len(lower)), lower, *(-key for key in reversed(keys))))


def find_durations(instance: Instance) -> Array:
    """Return the duration of each lifetime. If a buffer wraps, the iteration ends at the latest time of any buffer."""
    spans = np.array([(buffer.lower, buffer.upper) for buffer in instance.buffers], np.int64).reshape(-1, 2)
    durations = spans[:, 1] - spans[:, 0]
    return durations + (durations < 0) * spans.max(initial=0)


def find_areas(instance: Instance) -> Array:
    """Return bytes x duration of each buffer, as floats, since they may exceed 64 bits."""
    return instance.nbytes * find_durations(instance).astype(float)


def find_pressures(instance: Instance) -> Array:
    """Return, for each buffer, the peak of live bytes during its lifetime."""
    pressures = np.zeros(len(instance.buffers), np.int64)
    _find_pressures(instance.first, instance.last, instance.wrap, instance.loads, pressures)
    return pressures


@compiled
def _find_pressures(first: Array, last: Array, wrap: Array, loads: Array, pressures: Array) -> None:
    for block in range(len(first)):
        most = 0
        for section in range(first[block], last[block]):
            most = max(most, loads[section])
        for section in range(wrap[block]):
            most = max(most, loads[section])
        pressures[block] = most
