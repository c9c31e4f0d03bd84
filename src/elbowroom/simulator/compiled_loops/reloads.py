"""Schedules reloads: in order of use, as late as the link allows, and where there is room until the use."""

from __future__ import annotations

import numpy as np

from elbowroom._numba_loops import internal
from elbowroom.simulator.compiled_loops.columns import Columns
from elbowroom.simulator.compiled_loops.segments import OFFLOAD
from elbowroom.simulator.compiled_loops.transit import AWAY, LOOK_AHEAD, Sweep, event_at, fetch, next_slot, slot_of


@internal
def order_reloads(columns: Columns, slack: float, room: Sweep) -> None:
    """Sort offloaded gaps by their use, and compute the latest time at which each reload can begin."""
    moves = room.segments.moves
    order = room.order
    gaps = columns.gaps
    link = columns.link[0]
    count = 0
    for gap in range(len(moves)):
        if moves[gap].choice == OFFLOAD:
            position = count
            while position > 0 and moves[order[position - 1]].wanted > moves[gap].wanted:
                order[position] = order[position - 1]
                position -= 1
            order[position] = gap
            count += 1
    free = np.inf
    for position in range(count - 1, -1, -1):
        gap = order[position]
        took = link.back_latency + gaps[gap].payload / link.back_rate
        free = min(free, room.events[event_at(columns.events, moves[gap].wanted)].begin) - took
        moves[gap].latest = free - slack * took
    room.clock[0].reloads = count


@internal
def reload_early(columns: Columns, room: Sweep, budget_bytes: int, leaving: int, event: int) -> None:
    """Start the reloads that are due before the next event and have room until their use.

    `leaving`: bytes that were being copied out when the event began.
    """
    events = columns.events
    gaps = columns.gaps
    moves = room.segments.moves
    clock = room.clock[0]
    following = events[event].next
    free = clock.back_free
    seen = 0
    chosen = 0
    for position in range(clock.next_reload, clock.reloads):
        gap = room.order[position]
        if seen == LOOK_AHEAD or free > events[following].begin + clock.late:
            break
        if moves[gap].latest > room.events[following].begin:
            break
        seen += 1
        if moves[gap].state != AWAY or moves[gap].release_event == event:
            continue
        if events[event].tick < gaps[gap].released:
            continue
        clock.blocked = _find_block(columns, room, budget_bytes, leaving, event, gap)
        if clock.blocked >= 0:
            break
        free += columns.link[0].back_latency + gaps[gap].payload / columns.link[0].back_rate
        spot = chosen  # within one event, moves are carried out in order of storage
        while spot > 0 and gaps[room.chosen[spot - 1]].storage > gaps[gap].storage:
            room.chosen[spot] = room.chosen[spot - 1]
            spot -= 1
        room.chosen[spot] = gap
        chosen += 1
    for index in range(chosen):
        fetch(events, gaps, columns.link, moves, room.clock, room.chosen[index], event)


@internal
def _find_block(columns: Columns, room: Sweep, budget_bytes: int, leaving: int, event: int, gap: int) -> int:
    """Return the last slot in which a reload that starts now has no room; -1 if it fits, and then reserve its room."""
    begin, window = columns.events[event].at, next_slot(columns.events, event, len(columns.slots))
    end = slot_of(columns.events, room.segments.moves[gap].wanted)
    nbytes = columns.gaps[gap].rounded
    for slot in range(end - 1, begin - 1, -1):
        extra = leaving if slot == begin else (room.clock[0].leaving if slot < window else 0)
        if room.profile[slot] + extra + nbytes > budget_bytes:
            return slot
    for slot in range(begin, end):
        room.profile[slot] += nbytes
    return -1
