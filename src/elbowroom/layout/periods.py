"""Where a training loop repeats itself, from nothing but its requests for memory.

    events   a first iteration | iteration | iteration | iteration | evaluation ...
    tokens   of a take its bytes, of a give how many events ago its block was taken
                                 '--- period ---'

A token says the same in every iteration. Where the tokens from one place on are those from `period` events later, as
long as that for a whole period, an iteration follows its like. The period is looked for among the distances between
equal runs of tokens and their last occurrence before, so what comes first, last or in between does no harm, and of
several iterations merged the shortest period is found.

Source: Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", arXiv 1903.06631, and its code
(tokens, and what crosses an iteration). That compares every substring with every other; distances are inferred.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from elbowroom.errors import TraceError
from elbowroom.ir.buffers import Buffer

Array = Any

LEAST_PERIOD = 4
"""Shorter ones are loops inside of something."""

RUNS = (16, 4, 1)
"""So many tokens are compared at once when distances are counted; fewer where nothing was found."""

MOST_DISTANCES = 32
"""The most frequent distances are looked at closely."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A request: `nbytes` for a new block, or 0 bytes where the block of this key is given back."""

    key: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """What repeats.

    Attributes:
        begin: the first event of an iteration, where the fewest bytes are there.
        length: events in an iteration.
        end: one past the last event that is as it was one period before.
    """

    begin: int
    length: int
    end: int


def find_period(events: Sequence[Event]) -> Period | None:
    """The iteration that covers the most events; None if nothing repeats back to back.

    Raises:
        TraceError: something is given back that is not there, or taken while it is.

    Cost: linear in the events, times `MOST_DISTANCES`.
    """
    tokens = list_tokens(events)
    best = (0, 0, 0)  # events covered, minus the length, the begin
    for run in RUNS:
        for length in _list_distances(tokens, run):
            begin, equal = _find_longest(tokens[length:] == tokens[:-length])
            if equal >= length:
                best = max(best, (equal + length, -length, begin))
        if best[0]:
            break
    else:
        return None
    covered, length, begin = best[0], -best[1], best[2]
    loads = _sum_loads(events)
    quietest = begin + int(np.argmin(loads[begin : begin + covered - length + 1][:length]))
    return Period(begin=quietest, length=length, end=begin + covered)


def list_tokens(events: Sequence[Event]) -> Array:
    """One number an event.

    Raises:
        TraceError: something is given back that is not there, or taken while it is.
    """
    tokens = np.empty(len(events), np.int64)
    there: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes < 0 or (event.nbytes > 0) == (event.key in there):
            what = "taken while it is there" if event.nbytes > 0 else "given back while it is not there"
            raise TraceError(f"event {index}: block {event.key} is {what}")
        if event.nbytes:
            there[event.key] = index
            tokens[index] = event.nbytes
        else:
            tokens[index] = there.pop(event.key) - index
    return tokens


def _list_distances(tokens: Array, run: int) -> list[int]:
    """The most frequent distances between a run of tokens and its like before, shortest first."""
    count = max(len(tokens) - run + 1, 0)
    mixed = np.zeros(count, np.uint64)
    for offset in range(run):
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + tokens[offset : offset + count].astype(np.uint64)
    last: dict[int, int] = {}
    distances: Counter[int] = Counter()
    for index, value in enumerate(mixed.tolist()):
        if value in last:
            distances[index - last[value]] += 1
        last[value] = index
    frequent = (distance for distance, _ in distances.most_common(MOST_DISTANCES))
    return sorted(distance for distance in frequent if LEAST_PERIOD <= distance <= len(tokens) // 2)


def _find_longest(equal: Array) -> tuple[int, int]:
    """Begin and length of the longest run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], equal, [False]]).astype(np.int8)))
    if not len(edges):
        return 0, 0
    begins, ends = edges[::2], edges[1::2]
    index = int(np.argmax(ends - begins))
    return int(begins[index]), int(ends[index] - begins[index])


def _sum_loads(events: Sequence[Event]) -> Array:
    """Bytes that are there before each event."""
    sizes: dict[int, int] = {}
    loads = np.zeros(len(events) + 1, np.int64)
    for index, event in enumerate(events):
        if event.nbytes:
            sizes[event.key] = event.nbytes
        loads[index + 1] = loads[index] + (event.nbytes or -sizes[event.key])
    return loads


def list_iteration(events: Sequence[Event], period: Period) -> tuple[Buffer, ...]:
    """The buffers of one iteration; times are events since its begin, and what crosses into the next one wraps.

    A block that is there for a period or longer is there always, as often as there are blocks of its kind at a time.
    What is taken in the iteration and never given back is there always too.
    """
    found: list[Buffer] = []
    taken: dict[int, int] = {}
    ends: dict[int, int] = {}
    for index, event in enumerate(events):
        if event.nbytes:
            taken[event.key] = index
        else:
            ends[taken.pop(event.key)] = index
    for index in range(period.begin, min(period.begin + period.length, len(events))):
        if not events[index].nbytes:
            continue
        nbytes = events[index].nbytes
        lower = index - period.begin
        lifetime = ends.get(index, index + period.length) - index
        copies, rest = divmod(lifetime, period.length)
        if copies:
            copies += rest > 0
            found += [_buffer(len(found) + copy, 0, period.length, nbytes) for copy in range(copies)]
        else:
            found.append(_buffer(len(found), lower, (lower + lifetime) % period.length or period.length, nbytes))
    return tuple(found)


def _buffer(name: int, lower: int, upper: int, nbytes: int) -> Buffer:
    return Buffer(id=name, lower=lower, upper=upper, nbytes=nbytes)
