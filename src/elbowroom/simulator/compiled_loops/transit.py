"""State of a sweep, and its transfers over the lanes of one link."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elbowroom._numba_loops import inlined, internal
from elbowroom.simulator.compiled_loops.columns import Array, Columns, make_records
from elbowroom.simulator.compiled_loops.segment_arrays import Segments, make_segments

OPEN, PENDING, AWAY, ARRIVING, BACK = 0, 1, 2, 3, 4  # states of a gap

LOOK_AHEAD = 16
"""So many of the next gaps to close are looked at for one that can be reloaded now."""

_COPY = {
    "done": "f8",  # when it is below; inf: never
    "sent": "i8",  # the slot in which it began; -1
    "spilled": "i8",  # whether it is on the disk
    "end": "i8",  # of the claim: a tick
    "rounded": "i8",  # bytes
    "in_turn": "i8",  # not of this claim: the claim that is in this place by their ends
}
_EVENT = {"begin": "f8", "replay": "i8"}  # plain begin and the replays before it; the segment that runs at it (-1)
_CLOCK = {
    "late": "f8",  # behind the plain step
    "stall": "f8",
    "out_free": "f8",  # when the lanes are free
    "back_free": "f8",
    "first": "i8",  # of the pending gaps: the first, the first that the program still holds, and the end
    "fresh": "i8",
    "last": "i8",
    "leaving": "i8",  # bytes of the pending gaps that the program does not hold
    "blocked": "i8",  # until this slot no reload has room
    "reloads": "i8",  # gaps in `order`
    "next_reload": "i8",
    # Where the tier below overflows.
    "host_held": "i8",
    "host_peak": "i8",
    "disk_held": "i8",
    "disk_peak": "i8",
    "ended": "i8",  # claims that have ended
}
_OUTCOME = {
    "seconds": "f8",  # of the step
    "stall_seconds": "f8",
    "peak_bytes": "i8",
    "peak_slot": "i8",
    "lower_bytes": "i8",  # most in the tier below
    "disk_bytes": "i8",  # most on the disk behind it
}


class Sweep(NamedTuple):
    """Reusable buffers for one sweep, which hold its results afterwards."""

    segments: Segments
    copies: Array  # per claim
    order: Array  # offloaded gaps by the tick at which they are wanted
    chosen: Array  # reloads of one event
    pending: Array  # gaps whose copy is not known to be out
    profile: Array  # per slot: bytes held for certain
    held: Array  # per slot: bytes held in the end
    events: Array
    clock: Array  # one record
    outcome: Array  # one record


def make_sweep(columns: Columns) -> Sweep:
    """Allocate the buffers for sweeps over one trace."""
    gaps, slots = len(columns.gaps), len(columns.slots)
    return Sweep(
        segments=make_segments(columns),
        copies=make_records(
            _COPY,
            len(columns.claims),
            end=columns.claims["end"],
            rounded=columns.claims["rounded"],
            in_turn=np.argsort(columns.claims["end"], kind="stable"),
        ),
        order=np.zeros(gaps, dtype=np.int64),
        chosen=np.zeros(LOOK_AHEAD, dtype=np.int64),
        pending=np.zeros(gaps, dtype=np.int64),
        profile=np.zeros(slots + 1, dtype=np.int64),
        held=np.zeros(slots + 1, dtype=np.int64),
        events=make_records(_EVENT, len(columns.events)),
        clock=make_records(_CLOCK, 1),
        outcome=make_outcomes(1),
    )


def make_outcomes(count: int) -> Array:
    """Allocate the outcomes of a number of sweeps."""
    return make_records(_OUTCOME, count)


@internal
def event_at(events: Array, tick: int) -> int:
    """Return the first event at or after a tick."""
    low, high = 0, len(events) - 1
    while low < high:
        middle = (low + high) // 2
        if events[middle].tick < tick:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def slot_of(events: Array, tick: int) -> int:
    """Return the slot of the first event at or after a tick."""
    return int(events[event_at(events, tick)].at)


@inlined
def next_slot(events: Array, event: int, slots: int) -> int:
    """Return the end of the slots up to and including the next event at which anything can move."""
    following = events[event].next
    return int(events[following].at + 1) if following + 1 < len(events) else slots


@internal
def ensure(events: Array, gaps: Array, links: Array, moves: Array, clocks: Array, gap: int, event: int) -> None:
    """Bring a storage to the device by an event, waiting if necessary."""
    clock = clocks[0]
    if moves[gap].state == AWAY:
        fetch(events, gaps, links, moves, clocks, gap, event)
    if moves[gap].state == ARRIVING:
        stall = max(0.0, moves[gap].ready - events[event].begin - clock.late)
        clock.late += stall
        clock.stall += stall
    moves[gap].state = BACK


@internal
def fetch(events: Array, gaps: Array, links: Array, moves: Array, clocks: Array, gap: int, event: int) -> None:
    """Start the copy back from the tier below."""
    clock, link = clocks[0], links[0]
    moves[gap].state = ARRIVING
    moves[gap].back_event = event
    if link.overflows and moves[gap].spilled:
        _read_back(events, gaps, links, moves, clocks, gap, event)
        return
    begin = max(events[event].begin + clock.late, clock.back_free)
    if link.half_duplex:
        begin = max(begin, clock.out_free)
    clock.back_free = begin + link.back_latency + gaps[gap].payload / link.back_rate
    moves[gap].ready = clock.back_free
    clock.late += gaps[gap].payload * link.drag


@internal
def send(
    events: Array, gaps: Array, links: Array, moves: Array, copies: Array, pending: Array, clocks: Array, gap: int,
    event: int,
) -> None:  # fmt: skip
    """Start the copy to the tier below, unless one exists."""
    clock, copy = clocks[0], copies[gaps[gap].claim]
    moves[gap].state = PENDING
    pending[clock.last] = gap
    clock.last += 1
    if copy.sent < 0:
        copy.sent = events[event].at
        copy.done = _send(events, gaps, links, copies, clocks, gap, event)
    moves[gap].spilled = copy.spilled


@internal
def _send(events: Array, gaps: Array, links: Array, copies: Array, clocks: Array, gap: int, event: int) -> float:
    clock, link = clocks[0], links[0]
    if link.overflows and not _has_room(gaps, links, copies, clocks, gap, events[event].tick):
        return _write_out(events, gaps, links, clocks, gap, event)
    begin = max(events[event].begin + clock.late, clock.out_free)
    if link.half_duplex:
        begin = max(begin, clock.back_free)
    clock.out_free = begin + link.out_latency + gaps[gap].payload / link.out_rate
    clock.late += gaps[gap].payload * link.drag
    return float(clock.out_free)


@internal
def _has_room(gaps: Array, links: Array, copies: Array, clocks: Array, gap: int, tick: int) -> bool:
    """Reserve room for a copy in the tier below at a tick. Return False if there is none: the copy goes to disk."""
    clock, copy = clocks[0], copies[gaps[gap].claim]
    while clock.ended < len(copies) and copies[copies[clock.ended].in_turn].end <= tick:
        ended = copies[copies[clock.ended].in_turn]
        if ended.sent >= 0:
            if ended.spilled:
                clock.disk_held -= ended.rounded
            else:
                clock.host_held -= ended.rounded
        clock.ended += 1
    copy.spilled = clock.host_held + gaps[gap].rounded > links[0].host_room
    if not copy.spilled:
        clock.host_held += gaps[gap].rounded
        clock.host_peak = max(clock.host_peak, clock.host_held)
    return not copy.spilled


@internal
def _write_out(events: Array, gaps: Array, links: Array, clocks: Array, gap: int, event: int) -> float:
    """Copy to the disk while the step waits, as in `Lanes.send_through`. Return when it is done."""
    clock, link = clocks[0], links[0]
    now = events[event].begin + clock.late
    begin = max(now, clock.out_free)
    if link.half_duplex:
        begin = max(begin, clock.back_free)
    nbytes = gaps[gap].payload
    pieces = (nbytes + link.piece - 1) // link.piece
    last_bytes = nbytes - (pieces - 1) * link.piece
    copied = pieces * link.out_latency + nbytes / link.out_rate
    written = pieces * link.disk_out_latency + nbytes / link.disk_out_rate
    first = link.out_latency + min(link.piece, nbytes) / link.out_rate
    last = link.disk_out_latency + last_bytes / link.disk_out_rate
    done = begin + max(first + written, copied + last)
    clock.out_free = done
    clock.late += done - now
    clock.stall += done - now
    clock.disk_held += gaps[gap].rounded
    clock.disk_peak = max(clock.disk_peak, clock.disk_held)
    return float(done)


@internal
def _read_back(events: Array, gaps: Array, links: Array, moves: Array, clocks: Array, gap: int, event: int) -> None:
    """Start the copy back from the disk; the step waits until all is read, as in `Lanes.fetch_through`."""
    clock, link = clocks[0], links[0]
    now, lane = events[event].begin + clock.late, clock.back_free
    if link.half_duplex:
        lane = max(lane, clock.out_free)
    nbytes = gaps[gap].payload
    pieces = (nbytes + link.piece - 1) // link.piece
    last_bytes = nbytes - (pieces - 1) * link.piece
    copied = pieces * link.back_latency + nbytes / link.back_rate
    read = now + (pieces * link.disk_back_latency + nbytes / link.disk_back_rate)
    first = link.disk_back_latency + min(link.piece, nbytes) / link.disk_back_rate
    last = link.back_latency + last_bytes / link.back_rate
    clock.back_free = max(max(read, lane) + last, max(now + first, lane) + copied)
    moves[gap].ready = clock.back_free
    clock.late += read - now
    clock.stall += read - now
