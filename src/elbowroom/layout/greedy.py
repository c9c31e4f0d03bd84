"""Buffers placed one after the other, each where the earlier ones leave room: first fit and best fit, in machine code.

      [         every section          ]     A tree over the sections of time, 16 children a node. A buffer (#) fills
      [ ]  [ ]  [#]  [#]  [#]  [ ]  [ ]      some children and reaches into one or two more, where the same is asked
              #/            |#               again. Of each child the tree knows which addresses are taken in all of
           [ ][#]          [#][#][ ]         it by what fills it and not its parent; and, of 1, 2, 4, ... children
              <-- lifetime -->               side by side, which are taken in any of them.

What is in the way of a buffer are the second of what it fills, and the first of what it reaches into. Addresses that
touch are one stretch: where buffers are piled up without gaps, a pile of thousands is looked at as a whole.

Source: segment tree, Bentley 1977. Unions of addresses in it: inferred.
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
"""Of a union of addresses: where its stretches begin in the shared array, how many there are, and places for more."""

LOW, HIGH = 0, 1

NOWHERE = 1 << 62

WIDE = 16
"""Children of a node: with more, long buffers enter more unions; with fewer, piles fall into more of them. From 4 to 16
the time is the same, within what two runs differ by; with 64 it is twice that."""


def fit_in_order(instance: Instance, order: Array, *, best: bool = False, fixed: Array | None = None) -> Array:
    """Offsets of buffers that are placed in this order.

    Args:
        order: all that are not fixed.
        best: into the smallest gap that has room; otherwise into the lowest one.
        fixed: offsets that are given, -1 elsewhere; those that are pinned if None.

    Cost: some microseconds a buffer, and some nanoseconds for each gap below it that is too small.
    """
    offsets = (instance.pinned if fixed is None else fixed).copy()
    order = np.concatenate([np.flatnonzero(offsets >= 0), order[offsets[order] < 0]])
    lives = np.stack([instance.first, instance.last, instance.wrap], axis=1)
    sizes = np.stack([instance.nbytes, instance.alignment], axis=1)
    levels: list[tuple[int, int]] = []  # sections of a child, and the first union of the level; the widest first
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
    """Place what is in `order`; what has an offset is only put down."""
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
    """The unions that a buffer of the sections [first, last) enters, or those that are in its way; their end.

    Of a node with 16 children, unions 1 to 31 are a binary heap over them, and 32 to 47 are what fills each.
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
        for side in range(2):  # what it reaches into at its beginning, and, if that is another child, at its end
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
    """The offset of the first gap that all unions leave, or of the smallest; above everything if there is none."""
    top = np.int64(0)
    found = np.int64(-1)
    smallest = np.int64(NOWHERE)
    while True:
        begin = np.int64(NOWHERE)
        index = 0
        agreed = 0
        while agreed < count:  # up to where nothing is taken, all around
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
    """Give a union twice the room, at the end of what is used; returns the array, a longer one if need be."""
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
    """Put the addresses [low, high) into a union; what touches becomes one."""
    at, count = unions[union, AT], unions[union, COUNT]
    left, right = at, at + count
    while left < right:  # the first that does not end below
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
