"""Simulates a step under given choices in one pass: times of moves, duration, memory.

Choices say what happens in each gap; the sweep says when, from the budget:

    out      at once, first come first served
    release  when the copy is out; if there is no room for what comes next, the step waits for the oldest copy
    back     in the order of use, as late as the link allows and as soon after that as there is room until its use

So a plan is a vector of a few hundred small numbers, and a budget does the rest. What comes out is exact: the plan
made of a sweep's ticks has the same peak and seconds in `replay`, which tests hold it to.
"""

from __future__ import annotations

import numpy as np

from elbowroom._numba_loops import compiled, inlined, internal
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.reloads import order_reloads, reload_early
from elbowroom.simulator.compiled_loops.segments import KEEP, OFFLOAD, RECOMPUTE, find_segments
from elbowroom.simulator.compiled_loops.transit import (
    ARRIVING,
    AWAY,
    OPEN,
    PENDING,
    Sweep,
    ensure,
    event_at,
    next_slot,
    send,
    slot_of,
)


@compiled
def sweep(columns: Columns, choices: Array, budget_bytes: int, slack: float, limit: float, room: Sweep) -> bool:
    """Simulate a vector of choices.

    Args:
        choices: for each gap, as in `segments`.
        slack: reloads start this many of their own durations before they must.
        limit: seconds after which the sweep gives up.

    Returns:
        True if the choices are possible and take at most `limit`; `room.outcome` tells whether they fit.

    Cost: linear in the slots, the events and the ops replayed.
    """
    _settle(columns, choices, room.segments.moves)
    if find_segments(columns, room.segments) >= 0:
        return False
    _stretch(columns, room)
    _outline(columns, room)
    order_reloads(columns, slack, room)
    if not _run(columns, budget_bytes, limit, room):
        return False
    _measure(columns, room)
    return True


@compiled
def sweep_all(columns: Columns, batch: Array, budget_bytes: int, slack: float, room: Sweep, outcomes: Array) -> None:
    """Simulate every row of `batch`; impossible rows take infinite seconds.

    Args:
        outcomes: one record per row, with the fields of `Sweep.outcome`.
    """
    for row in range(len(batch)):
        if sweep(columns, batch[row], budget_bytes, slack, np.inf, room):
            outcomes[row] = room.outcome[0]
        else:
            outcomes[row].seconds = np.inf


@internal
def _settle(columns: Columns, choices: Array, moves: Array) -> None:
    """Set the choice of every gap; a storage whose copy still exists is reloaded instead of recomputed."""
    for gap in range(len(moves)):
        moves[gap].choice = choices[gap]
    for storage in range(len(columns.storages) - 1):
        copied = -1
        for index in range(columns.storages[storage].gaps_start, columns.storages[storage + 1].gaps_start):
            gap = columns.gap_lists[index]
            if moves[gap].choice >= RECOMPUTE and copied == columns.gaps[gap].claim:
                moves[gap].choice = OFFLOAD
            elif moves[gap].choice == OFFLOAD:
                copied = columns.gaps[gap].claim


@internal
def _stretch(columns: Columns, room: Sweep) -> None:
    """Compute the begin of each event including earlier replays, and the segment replayed at it."""
    events, segments = room.events, room.segments.segments
    for event in range(len(events)):
        events[event].replay = -1
    for segment in range(room.segments.tally[0].segments):
        events[segments[segment].event].replay = segment
    late = 0.0
    for event in range(len(events)):
        events[event].begin = columns.events[event].begin + late
        if events[event].replay >= 0:
            late += segments[events[event].replay].seconds


@internal
def _outline(columns: Columns, room: Sweep) -> None:
    """Compute the bytes of every slot if offloaded storages were away during their whole gap."""
    moves = room.segments.moves
    segments = room.segments.segments
    events = columns.events
    gaps = columns.gaps
    change = room.profile
    change[:] = 0
    for gap in range(len(moves)):
        moves[gap].release_event = moves[gap].back_event = -1
        moves[gap].state = OPEN
        if moves[gap].choice == OFFLOAD:
            begin = max(gaps[gap].free, events[gaps[gap].open_event].after)
            _take(change, begin, slot_of(events, moves[gap].wanted), gaps[gap].rounded)
        elif moves[gap].choice >= RECOMPUTE:
            leave, back = event_at(events, moves[gap].leave), segments[moves[gap].segment].event
            moves[gap].release_event, moves[gap].back_event = leave, back
            _absent(change, events, gaps, gap, leave, back)
    for segment in range(room.segments.tally[0].segments):
        _spike(change, events, segments, segment)
    total = 0
    for slot in range(len(columns.slots)):
        total += change[slot]
        change[slot] = columns.slots[slot] + total


@inlined
def _take(change: Array, begin: int, end: int, nbytes: int) -> None:
    if begin < end:
        change[begin] -= nbytes
        change[end] += nbytes


@inlined
def _absent(change: Array, events: Array, gaps: Array, gap: int, release: int, back: int) -> None:
    """Subtract a storage from the slots between two events."""
    _take(change, max(events[release].after, gaps[gap].free), events[back].at, gaps[gap].rounded)
    if events[back].tick < gaps[gap].released:  # the program still holds the old block
        change[events[back].at] += gaps[gap].rounded
        change[gaps[gap].released_slot] -= gaps[gap].rounded


@inlined
def _spike(change: Array, events: Array, segments: Array, segment: int) -> None:
    slot = events[segments[segment].event].at
    change[slot] += segments[segment].spike
    change[slot + 1] -= segments[segment].spike


@internal
def _run(columns: Columns, budget_bytes: int, limit: float, room: Sweep) -> bool:
    events = columns.events
    moves = room.segments.moves
    clock = room.clock[0]
    for claim in range(len(room.copies)):
        room.copies[claim].done, room.copies[claim].sent = np.inf, -1
    clock.late = clock.stall = clock.out_free = clock.back_free = 0.0
    clock.first = clock.fresh = clock.last = clock.leaving = clock.next_reload = 0
    clock.blocked = -1
    clock.host_held = clock.host_peak = clock.disk_held = clock.disk_peak = clock.ended = 0
    for event in range(len(events) - 1):
        gap = events[event].closes
        if gap >= 0 and moves[gap].choice == OFFLOAD:
            ensure(events, columns.gaps, columns.link, moves, room.clock, gap, event)
        if room.events[event].replay >= 0:
            _replay(columns, room, event)
        gap = events[event].opens
        if gap >= 0 and moves[gap].choice == OFFLOAD:
            send(events, columns.gaps, columns.link, moves, room.copies, room.pending, room.clock, gap, event)
        if not events[event].next:
            continue
        if columns.step_seconds + clock.late > limit:
            return False
        # Passing all arrays costs more than most events do, so calls without effect are skipped.
        leaving = clock.leaving
        if clock.first < clock.last:
            _release(events, columns.gaps, moves, room.copies, room.pending, room.profile, room.clock, budget_bytes,
                     event)  # fmt: skip
        while clock.next_reload < clock.reloads and moves[room.order[clock.next_reload]].state >= ARRIVING:
            clock.next_reload += 1
        if clock.next_reload < clock.reloads and events[event].at > clock.blocked:
            following = events[event].next
            due = moves[room.order[clock.next_reload]].latest <= room.events[following].begin
            if due and clock.back_free <= events[following].begin + clock.late:
                reload_early(columns, room, budget_bytes, leaving, event)
    room.outcome[0].seconds = columns.step_seconds + clock.late
    room.outcome[0].stall_seconds = clock.stall
    return bool(room.outcome[0].seconds <= limit)


@internal
def _replay(columns: Columns, room: Sweep, event: int) -> None:
    segments = room.segments.segments
    moves = room.segments.moves
    gaps = columns.gaps
    segment, tick = room.events[event].replay, columns.events[event].tick
    for index in range(segments[segment].leaves_start, segments[segment + 1].leaves_start):
        leaf = room.segments.leaves[index]
        for position in range(columns.storages[leaf].gaps_start, columns.storages[leaf + 1].gaps_start):
            gap = columns.gap_lists[position]
            if moves[gap].choice == OFFLOAD and gaps[gap].opens < tick < gaps[gap].closes:
                ensure(columns.events, gaps, columns.link, moves, room.clock, gap, event)
    room.clock[0].late += segments[segment].seconds


@internal
def _release(
    events: Array, gaps: Array, moves: Array, copies: Array, pending: Array, profile: Array, clocks: Array,
    budget_bytes: int, event: int,
) -> None:  # fmt: skip
    """Free storages that are copied out; wait for copies if there is no room until the next event."""
    clock = clocks[0]
    end = next_slot(events, event, len(profile) - 1)
    for index in range(clock.fresh, clock.last):  # storages that the program releases by the next event
        gap = pending[index]
        if gaps[gap].free < end:
            pending[index] = pending[clock.fresh]
            pending[clock.fresh] = gap
            clock.fresh += 1
            clock.leaving += gaps[gap].rounded
    ahead = 0
    for slot in range(events[event].after, end):
        ahead = max(ahead, profile[slot])
    while clock.first < clock.last:
        gap = pending[clock.first]
        wait = copies[gaps[gap].claim].done - events[event].begin - clock.late
        if wait > 0 and (ahead + clock.leaving <= budget_bytes or clock.first >= clock.fresh):
            break
        if moves[gap].state == PENDING:
            if wait > 0:
                clock.late += wait
                clock.stall += wait
            moves[gap].state = AWAY
            moves[gap].release_event = event
        if clock.first < clock.fresh:
            clock.leaving -= gaps[gap].rounded
        else:
            clock.fresh += 1
        clock.first += 1


@internal
def _measure(columns: Columns, room: Sweep) -> None:
    """Compute the final bytes of every slot, on the device and below."""
    change = room.held
    below = room.profile
    outcome = room.outcome[0]
    gaps = columns.gaps
    moves = room.segments.moves
    change[:] = 0
    below[:] = 0
    for gap in range(len(moves)):
        if moves[gap].choice == KEEP or moves[gap].release_event < 0:
            continue
        back = moves[gap].back_event if moves[gap].back_event >= 0 else gaps[gap].close_event
        _absent(change, columns.events, gaps, gap, moves[gap].release_event, back)
        copy = room.copies[gaps[gap].claim]
        if moves[gap].choice == OFFLOAD and copy.sent >= 0:
            below[copy.sent] += gaps[gap].rounded
            below[gaps[gap].claim_end] -= gaps[gap].rounded
            copy.sent = -1
    for segment in range(room.segments.tally[0].segments):
        _spike(change, columns.events, room.segments.segments, segment)
    total, in_lower = 0, 0
    outcome.peak_bytes = outcome.peak_slot = outcome.lower_bytes = 0
    for slot in range(len(columns.slots)):
        total += change[slot]
        in_lower += below[slot]
        room.held[slot] = columns.slots[slot] + total
        if room.held[slot] > outcome.peak_bytes:
            outcome.peak_bytes, outcome.peak_slot = room.held[slot], slot
        outcome.lower_bytes = max(outcome.lower_bytes, in_lower)
    outcome.disk_bytes = 0
    if columns.link[0].overflows:
        outcome.lower_bytes, outcome.disk_bytes = room.clock[0].host_peak, room.clock[0].disk_peak
