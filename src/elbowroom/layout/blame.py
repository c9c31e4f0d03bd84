"""Which decisions of a search are to blame: sets of frames, a bit each, from raises that are written down.

    a block is raised    because of
    by a decision        that decision: the block overlaps what was placed, and could not lie below it
    by a lift            why it does not lie lower, and why all that it could lie on do not
    with its equal       why that one is not lower

A frame that is not open follows from others, which stand in its place. So a set names decisions and nothing else. Where
offsets are aligned a set may lack one; so going back by it finds layouts, and proves nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from elbowroom._compiled import internal
from elbowroom.layout.desk import CLASHES, WORK, Desk

Array = Any


@internal
def forget(desk: Desk) -> None:
    """Nothing clashes."""
    for word in range(len(desk.clash)):
        desk.clash[word] = 0


@internal
def blame_all(desk: Desk, top: int) -> None:
    """Every decision has to do with the clash."""
    forget(desk)
    for frame in range(top):
        if desk.frames[frame].is_open:
            desk.clash[frame >> 6] |= np.int64(1) << np.int64(frame & 63)


@internal
def find_last(desk: Desk, top: int) -> int:
    """The last decision that has to do with the clash; -1 for none."""
    for word in range(top >> 6, -1, -1):
        if desk.clash[word]:
            for bit in range(63, -1, -1):
                if (desk.clash[word] >> bit) & 1:
                    return 64 * word + bit
    return -1


@internal
def justify(desk: Desk, frame: int, block: int) -> None:
    """Close a frame: write down why its block, which is not at its lowest offset, can only lie on one that is left."""
    reasons, this, low = desk.reasons[frame], desk.blocks[block], desk.low
    desk.frames[frame].is_open = 0
    desk.clash[frame >> 6] &= ~(np.int64(1) << np.int64(frame & 63))
    for word in range(len(reasons)):
        reasons[word] = desk.clash[word]
    add_cause(desk, block, low[block], reasons)
    lowest = np.int64(1 << 62)
    for place in range(this.near, this.far):
        other = desk.near[place]
        if low[other] >= 0:
            lowest = min(lowest, low[other] + desk.nbytes[other])
    desk.tally[WORK] += 8 * (this.far - this.near)
    for place in range(this.near, this.far):
        other = desk.near[place]
        if low[other] >= 0:
            add_cause(desk, other, lowest - desk.nbytes[other], reasons)
        else:
            _add_frame(desk, desk.blocks[other].frame, reasons)


@internal
def explain(desk: Desk, section: int, lowest: int, capacity: int) -> None:
    """Why a section has no room, by as few and as early decisions as will do: the fewer, the farther back."""
    forget(desk)
    desk.tally[CLASHES] += 1
    members, blocks, nbytes = desk.members, desk.blocks, desk.nbytes
    end, least = desk.begins[section + 1], desk.low[members[lowest]]
    excess = least - capacity
    for index in range(lowest, end):
        excess += nbytes[members[index]]
    while True:  # leave out what was raised last and is not needed
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
    desk.tally[WORK] += 8 * (end - lowest)
    for index in range(lowest, end):
        block = members[index]
        blocks[block].clashes += 1
        desk.recent[block] = desk.tally[CLASHES]
        add_cause(desk, block, least, desk.clash)


@internal
def add_cause(desk: Desk, block: int, least: int, reasons: Array) -> None:
    """Add why a block is at `least` or above."""
    raised = desk.blocks[block].raised
    while True:
        while raised >= 0 and desk.raises[raised].low >= least:
            raised = desk.raises[raised].before
        if raised < 0:
            return  # it begins there
        frame = desk.raises[raised].frame
        if frame < 0:
            block = desk.blocks[block].under
            least -= desk.nbytes[block]
            raised = desk.blocks[block].raised
            continue
        _add_frame(desk, frame, reasons)
        if not desk.frames[frame].is_open:
            return
        least = desk.frames[frame].offset - desk.nbytes[block] + 1  # or it would lie below
        raised = desk.raises[raised].before


@internal
def _add_frame(desk: Desk, frame: int, reasons: Array) -> None:
    if desk.frames[frame].is_open:
        reasons[frame >> 6] |= np.int64(1) << np.int64(frame & 63)
        return
    for word in range((frame >> 6) + 1):
        reasons[word] |= desk.reasons[frame, word]
