"""Greedy placement, compiled: place buffers in order, each in a gap between the earlier ones (first fit or best fit).

      [         every section          ]     A segment tree over the sections of time, 16 children per node. A buffer
      [ ]  [ ]  [#]  [#]  [#]  [ ]  [ ]      (#) covers some children entirely and one or two in part, where it
              #/            |#               recurses. Two kinds of unions of addresses are kept: per child, the
           [ ][#]          [#][#][ ]         buffers that cover it but not its parent; and per aligned group of 1, 2,
              <-- lifetime -->               4, ... children, the buffers that overlap any of them.

A buffer conflicts with the second kind for the children that it covers, and with the first kind for those that it
covers in part. Adjacent address ranges are merged, so a stack of thousands of buffers without gaps is one range.

Source: segment tree, Bentley 1977. Unions of addresses per node: inferred.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._numba_loops import compiled, internal
from elbowroom.layout.instance import Instance

Array = Any

AT = 0
COUNT = 1
ROOM = 2
"""Columns of a union of addresses: index of its first range in the shared array, number of ranges, capacity."""

LOW, HIGH = 0, 1

NOWHERE = 1 << 62

WIDE = 16
"""Children per node: with more, long buffers enter more unions; with fewer, a query reads more of them. The time is
equal from 4 to 16, within noise; with 64 it doubles."""


def fit_in_order(instance: Instance, order: Array, *, best: bool = False, fixed: Array | None = None) -> Array:
    """Place buffers in this order and return their offsets.

    Args:
        order: all buffers that are not fixed.
        best: best fit (smallest gap); otherwise first fit (lowest gap).
        fixed: given offsets, -1 elsewhere; the pinned offsets if None.

    Cost: some microseconds per buffer, plus some nanoseconds for each lower gap that is too small.
    """
    offsets = (instance.pinned if fixed is None else fixed).copy()
    order = np.concatenate([np.flatnonzero(offsets >= 0), order[offsets[order] < 0]])
    lives = np.stack([instance.first, instance.last, instance.wrap], axis=1)
    sizes = np.stack([instance.nbytes, instance.alignment], axis=1)
    levels: list[tuple[int, int]] = []  # sections per child and index of the first union, by level from the root
    unit, unions = 1, 0
    while not levels or unit < instance.sections:
        levels.insert(0, (unit, unions))
        unit *= WIDE
        unions += 3 * WIDE * max(-(-instance.sections // unit), 1)
    _fit_all(order, lives, sizes, best, np.array(levels), np.zeros((unions, 3), np.int64), offsets)
    return offsets


@compiled
def _fit_all(
    order: Array, lives: Array, sizes: Array, best: bool, levels: Array, unions: Array, offsets: Array
) -> None:
    """Place the buffers in `order`; those that have an offset are only entered."""
    parts, used = np.empty((1024, 2), np.int64), 0
    listed = np.empty(4 * levels.shape[0] * 3 * WIDE, np.int64)
    todo = np.empty((2 * levels.shape[0] + 2, 3), np.int64)
    ways = np.empty((len(listed), 2), np.int64)
    for block in order:
        first = lives[block, 0]
        last = lives[block, 1]
        wrap = lives[block, 2]
        low, nbytes = offsets[block], sizes[block, 0]
        if low < 0:
            end = _list_unions(first, last, False, levels, todo, listed, 0)
            if wrap > 0:
                end = _list_unions(0, wrap, False, levels, todo, listed, end)
            count = 0
            for index in range(end):
                union = listed[index]
                if unions[union, COUNT] > 0:
                    ways[count, 0], ways[count, 1] = unions[union, AT], unions[union, AT] + unions[union, COUNT]
                    count += 1
            low = _find_gap(parts, ways, count, nbytes, sizes[block, 1], best)
            offsets[block] = low
        end = _list_unions(first, last, True, levels, todo, listed, 0)
        if wrap > 0:
            end = _list_unions(0, wrap, True, levels, todo, listed, end)
        for index in range(end):
            union = listed[index]
            if unions[union, COUNT] == unions[union, ROOM]:
                parts, used = _move(unions, union, parts, used)
            _add(unions, union, parts, low, low + nbytes)


@internal
def _list_unions(first: int, last: int, is_new: bool, levels: Array, todo: Array, listed: Array, end: int) -> int:
    """List the unions that a buffer over sections [first, last) enters (`is_new`) or conflicts with; return the end.

    Of a node's 48 unions, 1 to 31 are a binary heap over its 16 children, and 32 to 47 hold the buffers that cover one.
    """
    todo[0, 0] = 0
    todo[0, 1] = first
    todo[0, 2] = last
    left, done = 1, 0
    while done < left:
        level = todo[done, 0]
        first = todo[done, 1]
        last = todo[done, 2]
        done += 1
        unit = levels[level, 0]
        node = first // (unit * WIDE)
        base, begin = levels[level, 1] + node * 3 * WIDE, node * unit * WIDE
        outer, inner = (first - begin) // unit, -(-(first - begin) // unit)
        ceiling, floor = -(-(last - begin) // unit), (last - begin) // unit
        if is_new:
            low, high = outer + WIDE, ceiling - 1 + WIDE
            while low > 0:
                for child in range(low, high + 1):
                    listed[end] = base + child
                    end += 1
                low >>= 1
                high >>= 1
            for child in range(inner, floor):
                listed[end] = base + 2 * WIDE + child
                end += 1
        else:
            low, high = inner + WIDE, floor + WIDE
            while low < high:
                if low & 1:
                    listed[end] = base + low
                    end += 1
                    low += 1
                if high & 1:
                    high -= 1
                    listed[end] = base + high
                    end += 1
                low >>= 1
                high >>= 1
        for side in range(2):  # the child covered in part at its beginning, and, if another, at its end
            child = outer if side == 0 else floor
            if outer < inner if side == 0 else floor < ceiling and not (outer < inner and outer == floor):
                todo[left, 0] = level + 1
                todo[left, 1] = max(first, begin + child * unit)
                todo[left, 2] = min(last, begin + (child + 1) * unit)
                left += 1
                if not is_new:
                    listed[end] = base + 2 * WIDE + child
                    end += 1
    return end


@internal
def _find_gap(parts: Array, ways: Array, count: int, nbytes: int, alignment: int, best: bool) -> int:
    """Return the offset of the first (`best`: smallest) gap in all unions; above everything if there is none."""
    top = np.int64(0)
    found = np.int64(-1)
    smallest = np.int64(NOWHERE)
    while True:
        begin = np.int64(NOWHERE)
        index = 0
        agreed = 0
        while agreed < count:  # raise `top` until it is free in all unions
            place, end = ways[index, 0], ways[index, 1]
            while place < end and parts[place, HIGH] <= top:
                place += 1
            agreed += 1
            if place < end and parts[place, LOW] <= top:
                top = parts[place, HIGH]
                begin = np.int64(NOWHERE)
                agreed = 0
            elif place < end:
                begin = min(begin, parts[place, LOW])
            ways[index, 0] = place
            index = index + 1 if index + 1 < count else 0
        offset = -(-top // alignment) * alignment
        if begin == NOWHERE:
            return int(offset if found < 0 else found)
        if begin - offset >= nbytes:
            if not best:
                return int(offset)
            if begin - offset < smallest:
                smallest, found = begin - offset, offset
        top = begin


@internal
def _move(unions: Array, union: int, parts: Array, used: int) -> tuple[Array, int]:
    """Double a union's capacity by moving it to the end of the array; return the array, reallocated if necessary."""
    at, count = unions[union, AT], unions[union, COUNT]
    room = max(4, 2 * count)
    if used + room > len(parts):
        longer = np.empty((2 * len(parts) + room, 2), np.int64)
        for place in range(used):
            longer[place, LOW], longer[place, HIGH] = parts[place, LOW], parts[place, HIGH]
        parts = longer
    for place in range(count):
        parts[used + place, LOW], parts[used + place, HIGH] = parts[at + place, LOW], parts[at + place, HIGH]
    unions[union, AT], unions[union, ROOM] = used, room
    return parts, used + room


@internal
def _add(unions: Array, union: int, parts: Array, low: int, high: int) -> None:
    """Add the addresses [low, high) to a union, and merge adjacent ranges."""
    at, count = unions[union, AT], unions[union, COUNT]
    left, right = at, at + count
    while left < right:  # the first range that does not end below `low`
        middle = (left + right) // 2
        if parts[middle, HIGH] < low:
            left = middle + 1
        else:
            right = middle
    end = left
    while end < at + count and parts[end, LOW] <= high:
        low, high = min(low, parts[end, LOW]), max(high, parts[end, HIGH])
        end += 1
    shift = 1 - (end - left)
    if shift > 0:
        for place in range(at + count, left, -1):
            parts[place, LOW], parts[place, HIGH] = parts[place - 1, LOW], parts[place - 1, HIGH]
    elif shift < 0:
        for place in range(end, at + count):
            parts[place + shift, LOW], parts[place + shift, HIGH] = parts[place, LOW], parts[place, HIGH]
    parts[left, LOW], parts[left, HIGH] = low, high
    unions[union, COUNT] = count + shift
