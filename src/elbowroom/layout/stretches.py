"""Time falls into stretches where nothing that is left crosses from one to the next: each is a search of its own.

######                  The block that has just been placed was all that joined A and B. Both are searched from
AAAAAAAA  ... BBBBB     here on by themselves; if either fails, that block is what has to be placed elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._compiled import compiled
from elbowroom.layout.desk import RANKED, WORK, Desk

Array = Any


@compiled
def part(
    desk: Desk, lo: int, hi: int, first: int, last: int, parent: int, head: int, agenda_top: int
) -> tuple[int, int]:
    """Part what is left of `pool` into stretches; returns the first of them and the end of the agenda."""
    hi = sort(desk, lo, hi)
    if lo == hi:
        return head, agenda_top
    floor, rank = np.int64(0), np.int64(-1)
    if parent >= 0:
        floor, rank = desk.offset[desk.frames[parent].placed], desk.rank[desk.frames[parent].placed]
    desk.tally[WORK] += 2 * (hi - lo) + last - first
    numbers, is_ranked = _number(desk, lo, hi, first, last), False
    if numbers > 1:
        _gather(desk, lo, hi, numbers)
        if desk.renews[0] and desk.tally[RANKED] + hi - lo <= len(desk.ranked_rank):
            _rank(desk, lo, hi)
            is_ranked, rank = True, np.int64(-1)
    while lo < hi:
        end = hi
        if numbers > 1:
            part = desk.parts[desk.first[desk.pool[lo]]]
            first, last, end = len(desk.parts), 0, lo
            while end < hi and desk.parts[desk.first[desk.pool[end]]] == part:
                first = min(first, desk.first[desk.pool[end]])
                last = max(last, desk.last[desk.pool[end]])
                end += 1
        if is_ranked:
            sort(desk, lo, end)
        stretch = desk.agenda[agenda_top]
        stretch.lo, stretch.hi, stretch.first, stretch.last = lo, end, first, last
        stretch.floor, stretch.rank, stretch.parent, stretch.next = floor, rank, parent, head
        head = agenda_top
        agenda_top += 1
        lo = end
    return head, agenda_top


@compiled
def _rank(desk: Desk, lo: int, hi: int) -> None:
    """Order what is left anew: first what is there when the most is."""
    load, need, pool, rank = desk.load, desk.need, desk.pool, desk.rank
    load[:] = 0
    for index in range(lo, hi):
        block = pool[index]
        load[desk.first[block] : desk.last[block]] += desk.nbytes[block]
    for index in range(lo, hi):
        block = pool[index]
        most = 0
        for section in range(desk.first[block], desk.last[block]):
            most = max(most, load[section])
        need[block] = most
        desk.tally[WORK] += 2 * (desk.last[block] - desk.first[block])
        desk.ranked_block[desk.tally[RANKED]], desk.ranked_rank[desk.tally[RANKED]] = block, rank[block]
        desk.tally[RANKED] += 1
        desk.spare[index] = block
    for index in range(lo + 1, hi):
        block, place = desk.spare[index], index
        while place > lo:
            other = desk.spare[place - 1]
            if need[other] > need[block] or (need[other] == need[block] and desk.order[other] < desk.order[block]):
                break
            desk.spare[place] = other
            place -= 1
        desk.tally[WORK] += index - place + 4
        desk.spare[place] = block
    for index in range(lo, hi):
        rank[desk.spare[index]] = index


@compiled
def _number(desk: Desk, lo: int, hi: int, first: int, last: int) -> int:
    """Number the sections, anew wherever no block that is left crosses into the next; returns how many numbers."""
    parts = desk.parts
    for section in range(first, last):
        parts[section] = 0
    for index in range(lo, hi):
        block = desk.pool[index]
        if desk.wrap[block] > 0:
            return 1
        parts[desk.first[block]] += 1
        parts[desk.last[block] - 1] -= 1
    crossing, number = 0, 0
    for section in range(first, last):
        crossing += parts[section]
        parts[section] = number
        if crossing == 0:
            number += 1
    return number


@compiled
def _gather(desk: Desk, lo: int, hi: int, numbers: int) -> None:
    """Blocks of one stretch come together; their order within it stays."""
    begins, parts = desk.load, desk.parts
    for number in range(numbers):
        begins[number] = 0
    for index in range(lo, hi):
        begins[parts[desk.first[desk.pool[index]]]] += 1
    place = lo
    for number in range(numbers):
        begins[number], place = place, place + begins[number]
    for index in range(lo, hi):
        block = desk.pool[index]
        number = parts[desk.first[block]]
        desk.spare[begins[number]] = block
        begins[number] += 1
    for index in range(lo, hi):
        desk.pool[index] = desk.spare[index]


@compiled
def sort(desk: Desk, lo: int, hi: int) -> int:
    """The blocks of `pool` that are left come first, by (low, rank); returns their end."""
    pool, low, rank = desk.pool, desk.low, desk.rank
    end = lo
    for index in range(lo, hi):
        block = pool[index]
        if desk.offset[block] >= 0:
            continue
        pool[index], place = pool[end], end
        while place > lo:
            other = pool[place - 1]
            if low[other] < low[block] or (low[other] == low[block] and rank[other] < rank[block]):
                break
            pool[place] = other
            place -= 1
        pool[place] = block
        desk.tally[WORK] += end - place + 4
        end += 1
    return end
