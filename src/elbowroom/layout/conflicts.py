"""Conflict analysis: find the decisions that a failure follows from, as a bit set of frames.

    a lower bound was raised    because of
    by a decision               that decision: the block overlaps the placed one, and cannot lie below it
    by a refuted decision       the conflict that refuted it, and why neither it nor any block it could rest on is lower
    with an equal block         the reasons of that block

A frame that is no longer open is replaced by the decisions that it follows from, so a conflict set contains open
decisions only. With aligned offsets a set may lack a decision; therefore a search that backjumps finds layouts but
proves nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._numba_loops import internal
from elbowroom.layout.search_state import CLASHES, WORK, SearchState

Array = Any


@internal
def forget(state: SearchState) -> None:
    """Clear the conflict set."""
    for word in range(len(state.clash)):
        state.clash[word] = 0


@internal
def blame_all(state: SearchState, top: int) -> None:
    """Put every open decision into the conflict set."""
    forget(state)
    for frame in range(top):
        if state.frames[frame].is_open:
            state.clash[frame >> 6] |= np.int64(1) << np.int64(frame & 63)


@internal
def find_last(state: SearchState, top: int) -> int:
    """Return the last decision in the conflict set; -1 if it is empty."""
    for word in range(top >> 6, -1, -1):
        if state.clash[word]:
            for bit in range(63, -1, -1):
                if (state.clash[word] >> bit) & 1:
                    return 64 * word + bit
    return -1


@internal
def justify(state: SearchState, frame: int, block: int) -> None:
    """Close a refuted frame: record why its block must lie above its lowest offset, on a block not placed yet."""
    reasons = state.reasons[frame]
    this = state.blocks[block]
    low = state.low
    state.frames[frame].is_open = 0
    state.clash[frame >> 6] &= ~(np.int64(1) << np.int64(frame & 63))
    for word in range(len(reasons)):
        reasons[word] = state.clash[word]
    add_cause(state, block, low[block], reasons)
    lowest = np.int64(1 << 62)
    for place in range(this.near, this.far):
        other = state.near[place]
        if low[other] >= 0:
            lowest = min(lowest, low[other] + state.nbytes[other])
    state.tally[WORK] += 8 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = state.near[place]
        if low[other] >= 0:
            add_cause(state, other, lowest - state.nbytes[other], reasons)
        else:
            _add_frame(state, state.blocks[other].frame, reasons)


@internal
def explain(state: SearchState, section: int, lowest: int, capacity: int) -> None:
    """Set the conflict set to why a section overflows: as few and as early decisions as possible, for longer jumps."""
    forget(state)
    state.tally[CLASHES] += 1
    members = state.members
    blocks = state.blocks
    nbytes = state.nbytes
    end, least = state.begins[section + 1], state.low[members[lowest]]
    excess = least - capacity
    for index in range(lowest, end):
        excess += nbytes[members[index]]
    while True:  # leave out the block raised last that is not needed for the overflow
        spare, last = -1, -1
        for index in range(lowest, end):
            block = members[index]
            if nbytes[block] < excess and blocks[block].raised > last:
                spare, last = index, blocks[block].raised
        if spare < 0:
            break
        excess -= nbytes[members[spare]]
        members[spare], members[lowest] = members[lowest], members[spare]
        lowest += 1
    state.tally[WORK] += 8 * (end - lowest)
    for index in range(lowest, end):
        block = members[index]
        blocks[block].clashes += 1
        state.recent[block] = state.tally[CLASHES]
        add_cause(state, block, least, state.clash)


@internal
def add_cause(state: SearchState, block: int, least: int, reasons: Array) -> None:
    """Add to `reasons` why a block lies at `least` or above."""
    raised = state.blocks[block].raised
    while True:
        while raised >= 0 and state.raises[raised].low >= least:
            raised = state.raises[raised].before
        if raised < 0:
            return  # its initial lower bound
        frame = state.raises[raised].frame
        if frame < 0:
            block = state.blocks[block].under
            least -= state.nbytes[block]
            raised = state.blocks[block].raised
            continue
        _add_frame(state, frame, reasons)
        if not state.frames[frame].is_open:
            return
        least = state.frames[frame].offset - state.nbytes[block] + 1  # or it would lie below
        raised = state.raises[raised].before


@internal
def _add_frame(state: SearchState, frame: int, reasons: Array) -> None:
    if state.frames[frame].is_open:
        reasons[frame >> 6] |= np.int64(1) << np.int64(frame & 63)
        return
    for word in range((frame >> 6) + 1):
        reasons[word] |= state.reasons[frame, word]
