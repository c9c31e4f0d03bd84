"""A search for offsets below a capacity: from the bottom up, depth first, in machine code.

    offset                    Placed so far, none below a later one: each new block goes to the lowest offset that what
      |        +--+           overlaps it in time leaves, so a partial layout is a pile that only grows upwards. Of the
      |  +-----+  |  ?        blocks that are left, `low` is that offset, `release` of one-machine scheduling.
      |  |   +--+----+
      +--+---+-------+-- time

What makes it fast is what it does not look at:

- Only canonical layouts: blocks in order of (offset, rank). Every layout can be pressed down into one of them.
- None with a gap that a block which is left would fill.
- None where some section of time cannot hold what is left: what must lie above an offset t, and t, are more than the
  capacity, for any t.
- Where what is left falls into stretches of time that share nothing, each is searched by itself; if one fails, the
  block whose placement parted them is placed elsewhere.
- Of two equal blocks, the second is not placed first.

Source: Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023
(canonical form, dominance, decomposition; its bound is the one here with t the lowest offset of a section alone). The
bound for every t is Jackson's, of scheduling one machine with release times. Twins: inferred.
"""

from __future__ import annotations

import numpy as np

from elbowroom._compiled import compiled
from elbowroom.layout.desk import RANKED, WORK, Desk, overlaps
from elbowroom.layout.stretches import part, sort

SOLVED, REFUTED, STOPPED = 1, 0, -1


@compiled
def search(desk: Desk, capacity: int, most_work: int) -> int:
    """Place every block below the capacity: SOLVED, with `desk.offset`; REFUTED: it cannot be done; or STOPPED."""
    count = len(desk.rank)
    desk.tally[WORK] = desk.tally[RANKED] = 0
    for block in range(count):
        desk.pool[block] = block
        desk.offset[block] = -1
        desk.low[block] = max(desk.pinned[block], 0)
        desk.rank[block] = desk.order[block]
    head, agenda_top = part(desk, 0, count, 0, len(desk.load), -1, -1, 0)
    top, logged = -1, 0
    while head >= 0:
        if desk.tally[WORK] > most_work:
            return STOPPED
        parent = desk.agenda[head].parent
        verdict = _open(desk, capacity, head, agenda_top, top, logged)
        if verdict == STOPPED:
            return STOPPED
        if verdict == SOLVED:
            top += 1
            parent = top
        while True:  # go on with the next thing to try of the last choice that has one
            if parent < 0:
                return REFUTED
            frame = desk.frames[parent]
            _undo(desk, parent, top, logged)
            top, logged = parent, frame.logged
            if frame.cursor < frame.end:
                break
            parent = frame.parent
        block = desk.tries[frame.cursor]
        frame.cursor += 1
        frame.placed = block
        if logged + 2 * (frame.hi - frame.lo) > len(desk.log_low):
            return STOPPED
        logged = _place(desk, block, frame.lo, frame.hi, logged)
        logged = _support(desk, block, frame.lo, sort(desk, frame.lo, frame.hi), logged)
        head, agenda_top = part(
            desk, frame.lo, frame.hi, frame.first, frame.last, parent, frame.agenda, frame.agenda_top
        )
    return SOLVED


@compiled
def _undo(desk: Desk, frame: int, top: int, logged: int) -> None:
    """Take back what was placed by a frame and by those above it."""
    for index in range(frame, top + 1):
        if desk.frames[index].placed >= 0:
            desk.offset[desk.frames[index].placed] = -1
            desk.frames[index].placed = -1
    for index in range(logged - 1, desk.frames[frame].logged - 1, -1):
        desk.low[desk.log_block[index]] = desk.log_low[index]
    for index in range(desk.tally[RANKED] - 1, desk.frames[frame].ranked - 1, -1):
        desk.rank[desk.ranked_block[index]] = desk.ranked_rank[index]
    desk.tally[RANKED] = desk.frames[frame].ranked


@compiled
def _place(desk: Desk, block: int, lo: int, hi: int, logged: int) -> int:
    """Put a block at its lowest offset, and what overlaps it above it; returns the new end of the log."""
    desk.offset[block] = desk.low[block]
    top = desk.low[block] + desk.nbytes[block]
    desk.tally[WORK] += 4 * (hi - lo)
    for index in range(lo, hi):
        other = desk.pool[index]
        if desk.offset[other] < 0 and desk.low[other] < top and overlaps(desk, block, other):
            desk.log_block[logged], desk.log_low[logged] = other, desk.low[other]
            logged += 1
            desk.low[other] = -(-top // desk.alignment[other]) * desk.alignment[other]
    return logged


@compiled
def _support(desk: Desk, placed: int, lo: int, hi: int, logged: int) -> int:
    """Raise what may no longer lie at its lowest offset: it will lie on something else; returns the log's end."""
    floor, rank = desk.offset[placed], desk.rank[placed]
    end = lo
    while end < hi:  # the pool is sorted: what has come too late is in front
        block = desk.pool[end]
        if desk.low[block] > floor or (desk.low[block] == floor and desk.rank[block] > rank):
            break
        lowest = np.int64(1 << 62)
        for place in range(lo, hi):
            other = desk.pool[place]
            if desk.low[other] >= lowest:
                break
            top = max(desk.low[other], floor) + desk.nbytes[other]
            desk.tally[WORK] += 4
            if top < lowest and other != block and overlaps(desk, block, other):
                lowest = top
        desk.need[block] = -(-lowest // desk.alignment[block]) * desk.alignment[block]
        end += 1
    for index in range(lo, end):
        block = desk.pool[index]
        desk.log_block[logged], desk.log_low[logged] = block, desk.low[block]
        logged += 1
        desk.low[block] = desk.need[block]
    return logged


@compiled
def _is_hopeless(desk: Desk, lo: int, hi: int, first: int, last: int, floor: int, capacity: int) -> bool:
    """Whether what is left cannot all lie below the capacity."""
    load = desk.load
    for section in range(first, last):
        load[section] = 0
    for index in range(hi - 1, lo - 1, -1):
        block = desk.pool[index]
        low, nbytes = desk.low[block], desk.nbytes[block]
        if desk.pinned[block] >= 0 and low > desk.pinned[block]:
            return True
        room = capacity - max(low, floor)
        most = 0
        for section in range(desk.first[block], desk.last[block]):
            load[section] += nbytes
            most = max(most, load[section])
        for section in range(desk.wrap[block]):
            load[section] += nbytes
            most = max(most, load[section])
        desk.tally[WORK] += desk.last[block] - desk.first[block] + desk.wrap[block] + 8
        if most > room:
            return True
    return False


@compiled
def _open(desk: Desk, capacity: int, head: int, agenda_top: int, top: int, logged: int) -> int:
    """A new frame for a stretch: SOLVED; REFUTED where nothing can come of it; STOPPED where room is used up."""
    stretch = desk.agenda[head]
    lo, hi, floor, rank = stretch.lo, stretch.hi, stretch.floor, stretch.rank
    if _is_hopeless(desk, lo, hi, stretch.first, stretch.last, floor, capacity):
        return REFUTED
    ceiling = np.int64(1 << 62)
    for index in range(lo, hi):
        block = desk.pool[index]
        ceiling = min(ceiling, desk.low[block] + desk.nbytes[block])
    frame = desk.frames[top + 1]
    frame.lo, frame.hi, frame.first, frame.last = lo, hi, stretch.first, stretch.last
    frame.candidates = frame.cursor = desk.frames[top].end if top >= 0 else 0
    frame.parent, frame.agenda, frame.agenda_top, frame.logged = stretch.parent, stretch.next, agenda_top, logged
    frame.placed = -1
    frame.ranked = desk.tally[RANKED]
    end = frame.cursor
    for index in range(lo, hi):
        block = desk.pool[index]
        if desk.low[block] >= ceiling:
            break
        if desk.low[block] < floor or (desk.low[block] == floor and desk.rank[block] < rank):
            continue
        if desk.twin[block] >= 0 and desk.offset[desk.twin[block]] < 0:
            continue
        if end == len(desk.tries):
            return STOPPED
        desk.tries[end] = block
        end += 1
    frame.end = end
    return SOLVED
