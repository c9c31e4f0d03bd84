"""A search for offsets below a capacity: from the bottom up, depth first, in machine code.

    offset                  What is placed is a pile that only grows upwards. Of the blocks that are left, `low` is the
      |        +--+         lowest offset that is left to them. A block that is at least as low as all that overlap it
      |  +-----+  |  x      is decided on: it lies there; or it lies higher, on one of these, and `low` is raised to
      |  |   +--+----+      where the lowest of them can end. Every layout can be pressed down to one that is found so.
      +--+---+-------+ time

What makes it fast is what it does not look at:

- In a search that proves: a block whose lowest offset is above everything that is placed, since the lowest of those
  that are left lies on the ground or on what is placed.
- Where nothing overlaps in time, the order of decisions makes no difference, and only one is tried.
- A section of time whose blocks cannot all lie below the capacity: those that must lie above an offset t, and t, are
  more than it, for any t.
- What has nothing to do with a failure: of each raise it is known which decisions it follows from, and so of each
  failure. The last of these decisions is taken back, and all after it; the others would fail in the same way.
- Of equal blocks, one that is earlier in the order lies lower.

Source: Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023
(layouts that are pressed down; its bound is the one here with t the lowest offset of a section alone). The bound for
every t is Jackson's, of scheduling one machine with release times; the way back is Prosser's, "Hybrid algorithms for
the constraint satisfaction problem", 1993. Decisions that are local in time, and equal blocks: inferred.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._compiled import compiled, internal
from elbowroom.layout.blame import add_cause, blame_all, explain, find_last, forget, justify
from elbowroom.layout.desk import CLASHES, JUMPS, WORK, Desk

Array = Any

SOLVED, REFUTED, STOPPED, UNPROVEN = 1, 0, -1, -2

NOWHERE = 1 << 62


@compiled
def search(desk: Desk, capacity: int, most_work: int, may_jump: bool) -> int:
    """Place every block below the capacity: SOLVED, with their offsets; REFUTED: it cannot be done; or STOPPED.

    Who jumps, passing over decisions that are not to blame, and deciding on what may have nothing to lie on, finds more
    and proves less: UNPROVEN where it comes to an end that is no proof, or to the end of what it can write down.
    """
    frames, tally = desk.frames, desk.tally
    if not _begin(desk, capacity):
        return REFUTED
    top, raised = 0, 0
    while tally[WORK] <= most_work:
        if top == len(frames) or raised + 3 * len(desk.low) >= len(desk.raises):
            return UNPROVEN
        block = _choose(desk) if may_jump else _choose_resting(desk)
        if block < 0 and not _is_left(desk):
            return SOLVED
        begin = raised
        if block < 0:
            blame_all(desk, top)
        else:
            frames[top].block, frames[top].offset = block, desk.low[block]
            frames[top].is_open, frames[top].raises = 1, raised
            if not may_jump:
                raised = _settle(desk, block, top, raised)
            raised = _place(desk, block, top, raised)
            top += 1
        while block < 0 or not _has_room(desk, begin, raised, capacity):
            block = 0
            open_frame = top - 1
            while open_frame >= 0 and not frames[open_frame].is_open:
                open_frame -= 1
            last = find_last(desk, top) if may_jump else open_frame
            if last < open_frame:
                tally[JUMPS] += 1
            if last < 0:
                return REFUTED if tally[JUMPS] == 0 else UNPROVEN
            raised = _take_back(desk, last, top, raised)
            begin, top = raised, last + 1
            justify(desk, last, frames[last].block)
            raised = _lift(desk, frames[last].block, last, raised)
    return STOPPED


@internal
def _begin(desk: Desk, capacity: int) -> bool:
    """Nothing is placed; whether every section has room."""
    blocks, low = desk.blocks, desk.low
    desk.tally[WORK] = desk.tally[JUMPS] = desk.tally[CLASHES] = 0
    for block in range(len(low)):
        blocks[block].raised = -1
        desk.recent[block] = 0
        low[block] = max(blocks[block].pinned, 0)
    for block in range(len(low)):
        if blocks[block].under < 0:
            below, above = block, blocks[block].above
            while above >= 0:
                low[above] = _align(blocks[above].alignment, low[below] + desk.nbytes[below])
                below, above = above, blocks[above].above
    for section in range(len(desk.starts)):
        desk.starts[section] = desk.ends[section] = 0
    for block in range(len(low)):
        _count(desk, block, 1)
    for place in range(len(desk.suspects)):
        desk.suspects[place] = 0
    has_room = True
    for section in range(len(desk.starts)):
        has_room &= _find_overfull(desk, section, capacity) < 0
    return has_room


@internal
def _choose(desk: Desk) -> int:
    """What is decided on next, -1 if everything is placed: a block that nothing can lie below any more.

    That is the lowest of all; or the lowest of those around what has clashed last, and of those around that.
    """
    low, rank, recent, is_local, chosen = desk.low, desk.rank, desk.recent, desk.is_local[0], -1
    desk.tally[WORK] += len(low)
    for block in range(len(low)):
        if low[block] < 0:
            continue
        if chosen < 0:
            chosen = block
            continue
        more = recent[block] - recent[chosen] if is_local else low[chosen] - low[block]
        if more > 0 or (more == 0 and rank[block] < rank[chosen]):
            chosen = block
    while is_local and chosen >= 0:
        begin = chosen
        this = desk.blocks[begin]
        desk.tally[WORK] += this.far - this.near
        for place in range(this.near, this.far):
            block = desk.near[place]
            if low[block] >= 0 and _is_lower(desk, block, chosen):
                chosen = block
        if chosen == begin:
            break
    return chosen


@internal
def _choose_resting(desk: Desk) -> int:
    """The same of a search that proves: the lowest that has something to lie on, -1 if nothing has."""
    low, chosen = desk.low, -1
    desk.tally[WORK] += len(low)
    for block in range(len(low)):
        if low[block] >= 0 and (chosen < 0 or _is_lower(desk, block, chosen)) and _is_supported(desk, block):
            chosen = block
    return chosen


@internal
def _is_left(desk: Desk) -> bool:
    """Whether anything is not placed."""
    is_left = False
    for block in range(len(desk.low)):
        is_left |= desk.low[block] >= 0
    return is_left


@internal
def _is_lower(desk: Desk, one: int, other: int) -> bool:
    low = desk.low
    return bool(low[one] < low[other] or (low[one] == low[other] and desk.rank[one] < desk.rank[other]))


@internal
def _is_supported(desk: Desk, block: int) -> bool:
    """Whether a block would lie on the ground, on what is placed, or where it is pinned."""
    this, low = desk.blocks[block], desk.low[block]
    if low == 0 or this.pinned >= 0:
        return True
    desk.tally[WORK] += this.far - this.near
    for place in range(this.near, this.far):
        other = desk.near[place]
        if desk.low[other] < 0:
            top = desk.blocks[other].offset + desk.nbytes[other]
            if top <= low < top + this.alignment:
                return True
    return False


@internal
def _align(alignment: int, offset: int) -> int:
    return -(-offset // alignment) * alignment


@internal
def _place(desk: Desk, block: int, frame: int, raised: int) -> int:
    """Put a block at its lowest offset, and what overlaps it above it; returns how many raises there are."""
    this, low = desk.blocks[block], desk.low
    this.offset, this.frame = low[block], frame
    top = low[block] + desk.nbytes[block]
    low[block] = -1
    _count(desk, block, -1)
    desk.tally[WORK] += 2 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = desk.near[place]
        if 0 <= low[other] < top:
            raised = _raise(desk, other, frame, top, raised)
    return raised


@internal
def _settle(desk: Desk, block: int, frame: int, raised: int) -> int:
    """Where a block is the lowest that has something to lie on, raise what is lower: it lies on what is not placed."""
    low, floor = desk.low, desk.low[block]
    for other in range(len(low)):
        if 0 <= low[other] < floor:
            lowest, this = NOWHERE, desk.blocks[other]
            desk.tally[WORK] += 2 * (this.far - this.near)
            for place in range(this.near, this.far):
                under = desk.near[place]
                if low[under] >= 0:
                    lowest = min(lowest, max(low[under], floor) + desk.nbytes[under])
            raised = _raise(desk, other, frame, lowest, raised)
    return raised


@internal
def _lift(desk: Desk, block: int, frame: int, raised: int) -> int:
    """A block does not lie at its lowest offset: raise it to where it can lie on another; returns as `_place`."""
    this, lowest = desk.blocks[block], NOWHERE
    desk.tally[WORK] += 2 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = desk.near[place]
        if desk.low[other] >= 0:
            lowest = min(lowest, desk.low[other] + desk.nbytes[other])
    return _raise(desk, block, frame, max(lowest, desk.low[block] + 1), raised)


@internal
def _raise(desk: Desk, block: int, frame: int, least: int, raised: int) -> int:
    """Raise a block, and with it those that are equal and lie above it."""
    low = desk.low
    while block >= 0 and low[block] < least:
        this, entry = desk.blocks[block], desk.raises[raised]
        entry.block, entry.low, entry.frame, entry.before = block, low[block], frame, this.raised
        low[block], this.raised = _align(this.alignment, least), raised
        raised += 1
        least = low[block] + desk.nbytes[block]
        block, frame = this.above, -1
    return raised


@internal
def _count(desk: Desk, block: int, change: int) -> None:
    """One more or less that is left begins and ends in the sections that a block begins and ends in."""
    this = desk.blocks[block]
    desk.starts[this.first] += change
    desk.ends[this.last - 1] += change
    if this.wrap > 0:
        desk.starts[0] += change
        desk.ends[this.wrap - 1] += change


@internal
def _take_back(desk: Desk, frame: int, top: int, raised: int) -> int:
    """Undo what followed from a decision and those after it; returns how many raises are left."""
    for index in range(frame, top):
        if desk.frames[index].is_open:
            desk.low[desk.frames[index].block] = desk.frames[index].offset
            _count(desk, desk.frames[index].block, 1)
    for index in range(raised - 1, desk.frames[frame].raises - 1, -1):
        entry = desk.raises[index]
        desk.low[entry.block], desk.blocks[entry.block].raised = entry.low, entry.before
    return int(desk.frames[frame].raises)


@internal
def _has_room(desk: Desk, begin: int, end: int, capacity: int) -> bool:
    """Whether what some raises raised has room below the capacity; if not, `clash` says why."""
    first, last, wrap = len(desk.starts), 0, 0
    for index in range(begin, end):
        block = desk.raises[index].block
        this, low = desk.blocks[block], desk.low[block]
        if low >= NOWHERE or 0 <= this.pinned < low:
            forget(desk)
            add_cause(desk, block, this.pinned + 1 if this.pinned >= 0 else low, desk.clash)
            return False
        first, last, wrap = min(first, this.first), max(last, this.last), max(wrap, this.wrap)
    if begin == end:
        return True
    for place in range(len(desk.suspects)):  # most often it is a section that had no room a moment ago
        if _is_overfull(desk, desk.suspects[place], place, capacity):
            return False
    for start, stop in ((first, last), (0, wrap)):
        has_start = True
        for section in range(start, stop):
            has_start |= desk.starts[section] > 0
            if has_start and desk.ends[section] > 0:  # or the one before it, or the next one, has all of its blocks
                has_start = False
                if _is_overfull(desk, section, len(desk.suspects) - 1, capacity):
                    return False
    return True


@internal
def _is_overfull(desk: Desk, section: int, place: int, capacity: int) -> bool:
    """Whether a section has no room: if so, it becomes the first suspect, and `clash` says why."""
    lowest = _find_overfull(desk, section, capacity)
    if lowest < 0:
        return False
    for index in range(place, 0, -1):
        desk.suspects[index] = desk.suspects[index - 1]
    desk.suspects[0] = section
    explain(desk, section, lowest, capacity)
    return True


@internal
def _find_overfull(desk: Desk, section: int, capacity: int) -> int:
    """The lowest of those in a section, by place in `members`, that cannot all lie above it; -1 if there is room."""
    members, low = desk.members, desk.low
    begin, end = desk.begins[section], desk.begins[section + 1]
    moves = 0
    for index in range(begin + 1, end):  # nearly sorted, as it was left the last time; what is placed comes first
        block, place = members[index], index
        while place > begin and low[members[place - 1]] > low[block]:
            members[place] = members[place - 1]
            place -= 1
        members[place] = block
        moves += index - place
    desk.tally[WORK] += moves + 3 * (end - begin)
    total = np.int64(0)
    for index in range(end - 1, begin - 1, -1):
        block = members[index]
        if low[block] < 0:
            break
        total += desk.nbytes[block]
        if total + low[block] > capacity:
            return index
    return -1
