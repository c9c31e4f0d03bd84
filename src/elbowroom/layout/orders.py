"""In which order buffers are placed. Ties are broken by what lives earlier, and then by place."""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._numba_loops import compiled
from elbowroom.layout.instance import Instance

Array = Any


def order_by(instance: Instance, *keys: Array) -> Array:
    """Buffers in an order: the largest first key first, and so on."""
    lower = np.array([buffer.lower for buffer in instance.buffers], np.int64)
    return np.lexsort((np.arange(len(lower)), lower, *(-key for key in reversed(keys))))


def find_durations(instance: Instance) -> Array:
    """How long each buffer is there; what wraps, as if the iteration ended with the last time that any names."""
    spans = np.array([(buffer.lower, buffer.upper) for buffer in instance.buffers], np.int64).reshape(-1, 2)
    durations = spans[:, 1] - spans[:, 0]
    return durations + (durations < 0) * spans.max(initial=0)


def find_areas(instance: Instance) -> Array:
    """Bytes times how long they are there, as floats: they need not fit 64 bits."""
    return instance.nbytes * find_durations(instance).astype(float)


def find_pressures(instance: Instance) -> Array:
    """Of each buffer, the most bytes that are there while it is."""
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
