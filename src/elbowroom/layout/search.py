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

from elbowroom._numba_loops import compiled, internal
from elbowroom.layout.conflicts import add_cause, blame_all, explain, find_last, forget, justify
from elbowroom.layout.search_state import CLASHES, JUMPS, WORK, SearchState

Array = Any

SOLVED = 1
REFUTED = 0
STOPPED = -1
UNPROVEN = -2

NOWHERE = 1 << 62


@compiled
def search_offsets(state: SearchState, capacity: int, most_work: int, may_jump: bool) -> int:
    """Place every block below the capacity: SOLVED, with their offsets; REFUTED: it cannot be done; or STOPPED.

    Who jumps, passing over decisions that are not to blame, and deciding on what may have nothing to lie on, finds more
    and proves less: UNPROVEN where it comes to an end that is no proof, or to the end of what it can write down.
    """
    frames, tally = state.frames, state.tally
    if not _begin(state, capacity):
        return REFUTED
    top, raised = 0, 0
    while tally[WORK] <= most_work:
        if top == len(frames) or raised + 3 * len(state.low) >= len(state.raises):
            return UNPROVEN
        block = _choose(state) if may_jump else _choose_resting(state)
        if block < 0 and not _is_left(state):
            return SOLVED
        begin = raised
        if block < 0:
            blame_all(state, top)
        else:
            frames[top].block, frames[top].offset = block, state.low[block]
            frames[top].is_open, frames[top].raises = 1, raised
            if not may_jump:
                raised = _settle(state, block, top, raised)
            raised = _place(state, block, top, raised)
            top += 1
        while block < 0 or not _has_room(state, begin, raised, capacity):
            block = 0
            open_frame = top - 1
            while open_frame >= 0 and not frames[open_frame].is_open:
                open_frame -= 1
            last = find_last(state, top) if may_jump else open_frame
            if last < open_frame:
                tally[JUMPS] += 1
            if last < 0:
                return REFUTED if tally[JUMPS] == 0 else UNPROVEN
            raised = _take_back(state, last, top, raised)
            begin, top = raised, last + 1
            justify(state, last, frames[last].block)
            raised = _exclude_lowest(state, frames[last].block, last, raised)
    return STOPPED


@internal
def _begin(state: SearchState, capacity: int) -> bool:
    """Nothing is placed; whether every section has room."""
    blocks, low = state.blocks, state.low
    state.tally[WORK] = state.tally[JUMPS] = state.tally[CLASHES] = 0
    for block in range(len(low)):
        blocks[block].raised = -1
        state.recent[block] = 0
        low[block] = max(blocks[block].pinned, 0)
    for block in range(len(low)):
        if blocks[block].under < 0:
            below, above = block, blocks[block].above
            while above >= 0:
                low[above] = _align(blocks[above].alignment, low[below] + state.nbytes[below])
                below, above = above, blocks[above].above
    for section in range(len(state.starts)):
        state.starts[section] = state.ends[section] = 0
    for block in range(len(low)):
        _count(state, block, 1)
    for place in range(len(state.suspects)):
        state.suspects[place] = 0
    has_room = True
    for section in range(len(state.starts)):
        has_room &= _find_overfull(state, section, capacity) < 0
    return has_room


@internal
def _choose(state: SearchState) -> int:
    """What is decided on next, -1 if everything is placed: a block that nothing can lie below any more.

    That is the lowest of all; or the lowest of those around what has clashed last, and of those around that.
    """
    low = state.low
    rank = state.rank
    recent = state.recent
    is_local = state.is_local[0]
    chosen = -1
    state.tally[WORK] += len(low)
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
        this = state.blocks[begin]
        state.tally[WORK] += this.far - this.near
        for place in range(this.near, this.far):
            block = state.near[place]
            if low[block] >= 0 and _is_lower(state, block, chosen):
                chosen = block
        if chosen == begin:
            break
    return chosen


@internal
def _choose_resting(state: SearchState) -> int:
    """The same of a search that proves: the lowest that has something to lie on, -1 if nothing has."""
    low, chosen = state.low, -1
    state.tally[WORK] += len(low)
    for block in range(len(low)):
        if low[block] >= 0 and (chosen < 0 or _is_lower(state, block, chosen)) and _is_supported(state, block):
            chosen = block
    return chosen


@internal
def _is_left(state: SearchState) -> bool:
    """Whether anything is not placed."""
    is_left = False
    for block in range(len(state.low)):
        is_left |= state.low[block] >= 0
    return is_left


@internal
def _is_lower(state: SearchState, one: int, other: int) -> bool:
    low = state.low
    return bool(low[one] < low[other] or (low[one] == low[other] and state.rank[one] < state.rank[other]))


@internal
def _is_supported(state: SearchState, block: int) -> bool:
    """Whether a block would lie on the ground, on what is placed, or where it is pinned."""
    this, low = state.blocks[block], state.low[block]
    if low == 0 or this.pinned >= 0:
        return True
    state.tally[WORK] += this.far - this.near
    for place in range(this.near, this.far):
        other = state.near[place]
        if state.low[other] < 0:
            top = state.blocks[other].offset + state.nbytes[other]
            if top <= low < top + this.alignment:
                return True
    return False


@internal
def _align(alignment: int, offset: int) -> int:
    return -(-offset // alignment) * alignment


@internal
def _place(state: SearchState, block: int, frame: int, raised: int) -> int:
    """Put a block at its lowest offset, and what overlaps it above it; returns how many raises there are."""
    this, low = state.blocks[block], state.low
    this.offset, this.frame = low[block], frame
    top = low[block] + state.nbytes[block]
    low[block] = -1
    _count(state, block, -1)
    state.tally[WORK] += 2 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = state.near[place]
        if 0 <= low[other] < top:
            raised = _tighten(state, other, frame, top, raised)
    return raised


@internal
def _settle(state: SearchState, block: int, frame: int, raised: int) -> int:
    """Where a block is the lowest that has something to lie on, raise what is lower: it lies on what is not placed."""
    low, floor = state.low, state.low[block]
    for other in range(len(low)):
        if 0 <= low[other] < floor:
            lowest, this = NOWHERE, state.blocks[other]
            state.tally[WORK] += 2 * (this.far - this.near)
            for place in range(this.near, this.far):
                under = state.near[place]
                if low[under] >= 0:
                    lowest = min(lowest, max(low[under], floor) + state.nbytes[under])
            raised = _tighten(state, other, frame, lowest, raised)
    return raised


@internal
def _exclude_lowest(state: SearchState, block: int, frame: int, raised: int) -> int:
    """A block does not lie at its lowest offset: raise it to where it can lie on another; returns as `_place`."""
    this, lowest = state.blocks[block], NOWHERE
    state.tally[WORK] += 2 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = state.near[place]
        if state.low[other] >= 0:
            lowest = min(lowest, state.low[other] + state.nbytes[other])
    return _tighten(state, block, frame, max(lowest, state.low[block] + 1), raised)


@internal
def _tighten(state: SearchState, block: int, frame: int, least: int, raised: int) -> int:
    """Raise a block, and with it those that are equal and lie above it."""
    low = state.low
    while block >= 0 and low[block] < least:
        this, entry = state.blocks[block], state.raises[raised]
        entry.block = block
        entry.low = low[block]
        entry.frame = frame
        entry.before = this.raised
        low[block], this.raised = _align(this.alignment, least), raised
        raised += 1
        least = low[block] + state.nbytes[block]
        block, frame = this.above, -1
    return raised


@internal
def _count(state: SearchState, block: int, change: int) -> None:
    """One more or less that is left begins and ends in the sections that a block begins and ends in."""
    this = state.blocks[block]
    state.starts[this.first] += change
    state.ends[this.last - 1] += change
    if this.wrap > 0:
        state.starts[0] += change
        state.ends[this.wrap - 1] += change


@internal
def _take_back(state: SearchState, frame: int, top: int, raised: int) -> int:
    """Undo what followed from a decision and those after it; returns how many raises are left."""
    for index in range(frame, top):
        if state.frames[index].is_open:
            state.low[state.frames[index].block] = state.frames[index].offset
            _count(state, state.frames[index].block, 1)
    for index in range(raised - 1, state.frames[frame].raises - 1, -1):
        entry = state.raises[index]
        state.low[entry.block], state.blocks[entry.block].raised = entry.low, entry.before
    return int(state.frames[frame].raises)


@internal
def _has_room(state: SearchState, begin: int, end: int, capacity: int) -> bool:
    """Whether what some raises raised has room below the capacity; if not, `clash` says why."""
    first = len(state.starts)
    last = 0
    wrap = 0
    for index in range(begin, end):
        block = state.raises[index].block
        this, low = state.blocks[block], state.low[block]
        if low >= NOWHERE or 0 <= this.pinned < low:
            forget(state)
            add_cause(state, block, this.pinned + 1 if this.pinned >= 0 else low, state.clash)
            return False
        first, last, wrap = min(first, this.first), max(last, this.last), max(wrap, this.wrap)
    if begin == end:
        return True
    for place in range(len(state.suspects)):  # most often it is a section that had no room a moment ago
        if _is_overfull(state, state.suspects[place], place, capacity):
            return False
    for start, stop in ((first, last), (0, wrap)):
        has_start = True
        for section in range(start, stop):
            has_start |= state.starts[section] > 0
            if has_start and state.ends[section] > 0:  # or the one before it, or the next one, has all of its blocks
                has_start = False
                if _is_overfull(state, section, len(state.suspects) - 1, capacity):
                    return False
    return True


@internal
def _is_overfull(state: SearchState, section: int, place: int, capacity: int) -> bool:
    """Whether a section has no room: if so, it becomes the first suspect, and `clash` says why."""
    lowest = _find_overfull(state, section, capacity)
    if lowest < 0:
        return False
    for index in range(place, 0, -1):
        state.suspects[index] = state.suspects[index - 1]
    state.suspects[0] = section
    explain(state, section, lowest, capacity)
    return True


@internal
def _find_overfull(state: SearchState, section: int, capacity: int) -> int:
    """The lowest of those in a section, by place in `members`, that cannot all lie above it; -1 if there is room."""
    members, low = state.members, state.low
    begin, end = state.begins[section], state.begins[section + 1]
    moves = 0
    for index in range(begin + 1, end):  # nearly sorted, as it was left the last time; what is placed comes first
        block, place = members[index], index
        while place > begin and low[members[place - 1]] > low[block]:
            members[place] = members[place - 1]
            place -= 1
        members[place] = block
        moves += index - place
    state.tally[WORK] += moves + 3 * (end - begin)
    total = np.int64(0)
    for index in range(end - 1, begin - 1, -1):
        block = members[index]
        if low[block] < 0:
            break
        total += state.nbytes[block]
        if total + low[block] > capacity:
            return index
    return -1
