"""Depth-first search for offsets below a capacity, from the bottom up, compiled.

    offset                  Blocks are placed upwards only. `low` is a lower bound on the offset of every block not
      |        +--+         placed yet. The search branches on a block whose `low` is minimal among all that overlap
      |  +-----+  |  x      it: either it lies at `low`; or it lies higher, on one of those, and its `low` is raised
      |  |   +--+----+      to the lowest end that one of them can have. Pushing every block of a layout down gives a
      +--+---+-------+ time layout of this kind, so the search is complete.

Pruning:

- The exhaustive search branches on supported blocks only, since the lowest block not placed yet lies on the ground or
  on a placed block.
- The order of decisions that do not overlap in time is irrelevant, and only one is tried.
- A section fails if, for some offset t, the blocks that must lie above t have more bytes than the capacity minus t.
- Conflict-directed backjumping: every raise records the decisions that it follows from, and so does every failure. The
  search returns to the last of these decisions, since any other choice after it would fail in the same way.
- Symmetry: of equal blocks, the earlier one in the order lies lower.

Source: Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning", ASPLOS 2023
(pushing layouts down; its bound is the one here for t = the lowest offset of a section). The bound for every t is
Jackson's, for scheduling one machine with release times; backjumping is from Prosser, "Hybrid algorithms for the
constraint satisfaction problem", 1993. Decisions that are local in time, and equal blocks: inferred.
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
    """Place every block below the capacity: SOLVED (see `state.blocks`), REFUTED (impossible) or STOPPED (work limit).

    With `may_jump`, backjump over decisions outside the conflict set and also branch on unsupported blocks. This finds
    layouts faster but is not exhaustive: UNPROVEN if no decision is left after a jump, or the trail is full.
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
    """Reset the state; tell whether every section can fit below the capacity."""
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
    """Choose the block to branch on: one that no overlapping block can lie below. -1 if every block is placed.

    It is the lowest of all; or, if `is_local`, the block that was in conflict most recently, followed downwards to
    lower overlapping blocks until none is lower.
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
    """Choose the lowest supported block, for the exhaustive search; -1 if there is none."""
    low, chosen = state.low, -1
    state.tally[WORK] += len(low)
    for block in range(len(low)):
        if low[block] >= 0 and (chosen < 0 or _is_lower(state, block, chosen)) and _is_supported(state, block):
            chosen = block
    return chosen


@internal
def _is_left(state: SearchState) -> bool:
    """Tell whether any block is not placed."""
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
    """Tell whether a block at `low` lies on the ground, on a placed block, or where it is pinned."""
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
    """Place a block at `low`, and raise overlapping blocks above it; return the number of raises."""
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
    """Raise blocks below the lowest supported block: they must lie on blocks that are not placed yet."""
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
    """Exclude `low` for a block: raise it to where it can lie on another block; return the number of raises."""
    this, lowest = state.blocks[block], NOWHERE
    state.tally[WORK] += 2 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = state.near[place]
        if state.low[other] >= 0:
            lowest = min(lowest, state.low[other] + state.nbytes[other])
    return _tighten(state, block, frame, max(lowest, state.low[block] + 1), raised)


@internal
def _tighten(state: SearchState, block: int, frame: int, least: int, raised: int) -> int:
    """Raise a block, and the equal blocks above it, to `least` or higher; return the number of raises."""
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
    """Add `change` to the counts of unplaced blocks that begin and end in a block's first and last sections."""
    this = state.blocks[block]
    state.starts[this.first] += change
    state.ends[this.last - 1] += change
    if this.wrap > 0:
        state.starts[0] += change
        state.ends[this.wrap - 1] += change


@internal
def _take_back(state: SearchState, frame: int, top: int, raised: int) -> int:
    """Undo a decision and all after it; return the number of raises left."""
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
    """Tell whether the raised blocks can fit below the capacity; if not, set the conflict set `clash`."""
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
    for place in range(len(state.suspects)):  # recently overfull sections first: they are the likeliest
        if _is_overfull(state, state.suspects[place], place, capacity):
            return False
    for start, stop in ((first, last), (0, wrap)):
        has_start = True
        for section in range(start, stop):
            has_start |= state.starts[section] > 0
            if has_start and state.ends[section] > 0:  # else a neighbouring section has all of its blocks
                has_start = False
                if _is_overfull(state, section, len(state.suspects) - 1, capacity):
                    return False
    return True


@internal
def _is_overfull(state: SearchState, section: int, place: int, capacity: int) -> bool:
    """Tell whether a section cannot fit; if so, make it the first suspect and set the conflict set `clash`."""
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
    """Find an index in `members` from which on the section's blocks exceed the capacity; -1 if there is none.

    The blocks from there on must all lie at or above the lower bound of the first of them.
    """
    members, low = state.members, state.low
    begin, end = state.begins[section], state.begins[section + 1]
    moves = 0
    for index in range(begin + 1, end):  # insertion sort: nearly sorted since the last call; placed blocks come first
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
