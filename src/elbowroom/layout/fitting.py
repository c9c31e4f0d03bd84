"""Buffers placed one after the other, each where the earlier ones leave room: first fit and best fit, in machine code.

offset   |#######|            What overlaps the new one in time is looked at from the bottom up; `top` is how far
         |       |  gap       it reaches. Where the next one begins far enough above `top`, there is a gap.
  top -> |###|---|
         |###|###|
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._compiled import compiled
from elbowroom.layout.instance import Instance

Array = Any


def fit(instance: Instance, order: Array, *, best: bool = False, fixed: Array | None = None) -> Array:
    """Offsets of buffers that are placed in this order.

    Args:
        order: all that are not fixed.
        best: into the smallest gap that has room; otherwise into the lowest one.
        fixed: offsets that are given, -1 elsewhere; those that are pinned if None.

    Cost: quadratic, a nanosecond a pair or less.
    """
    offsets = (instance.pinned if fixed is None else fixed).copy()
    order = order[offsets[order] < 0]
    pile = np.empty(len(offsets), np.int64)
    there = np.flatnonzero(offsets >= 0)
    pile[: len(there)] = there[np.argsort(offsets[there], kind="stable")]
    lives = np.stack([instance.first, instance.last, instance.wrap], axis=1)
    sizes = np.stack([instance.nbytes, instance.alignment], axis=1)
    _fit_all(order, lives, sizes, best, pile, len(there), offsets)
    return offsets


@compiled
def _fit_all(order: Array, lives: Array, sizes: Array, best: bool, pile: Array, count: int, offsets: Array) -> None:
    """Place what is in `order`; `pile` has what is placed, by offset."""
    for block in order:
        offset = _find_gap(block, lives, sizes, best, pile, count, offsets)
        offsets[block] = offset
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if offsets[pile[middle]] <= offset:
                low = middle + 1
            else:
                high = middle
        for place in range(count, low, -1):
            pile[place] = pile[place - 1]
        pile[low] = block
        count += 1


@compiled
def _find_gap(block: int, lives: Array, sizes: Array, best: bool, pile: Array, count: int, offsets: Array) -> int:
    """The offset of the first gap for a block, or of the smallest; above everything if there is none."""
    first, last, wrap = lives[block]
    nbytes, alignment = sizes[block]
    top, found, smallest = np.int64(0), np.int64(-1), np.int64(1 << 62)
    for place in range(count):
        other = pile[place]
        if not (
            (first < lives[other, 1] and lives[other, 0] < last)
            or wrap > lives[other, 0]
            or lives[other, 2] > first
            or (wrap > 0 and lives[other, 2] > 0)
        ):
            continue
        begin = offsets[other]
        if begin > top:
            gap = begin - (top + alignment - 1) // alignment * alignment
            if gap >= nbytes:
                if not best:
                    return int((top + alignment - 1) // alignment * alignment)
                if gap < smallest:
                    smallest, found = gap, top
        top = max(top, begin + sizes[other, 0])
    if found < 0:
        found = top
    return int((found + alignment - 1) // alignment * alignment)
