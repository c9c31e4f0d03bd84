"""Iterations found in raw requests: a first one that differs, several merged, blocks that cross, noise at the end."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import TraceError
from elbowroom.ir.buffers import check_buffers
from elbowroom.layout.periods import Event, find_period, list_iteration


def make_events(first: int, blocks: int, iterations: int, after: int, seed: int, crossing: int = 2) -> list[Event]:
    """Parameters and a first iteration of its own; iterations whose last blocks live on into the next; noise."""
    chance = random.Random(seed)
    sizes = [chance.randrange(1, 1 << 20) for _ in range(blocks)]
    events = [Event(key=-1 - index, nbytes=chance.randrange(1, 99)) for index in range(first)]
    key, alive = 0, []
    for _ in range(iterations):
        old, alive = alive, []
        for index, nbytes in enumerate(sizes):
            events.append(Event(key=key, nbytes=nbytes))
            alive.append(key)
            key += 1
            if index < len(old):
                events.append(Event(key=old[index], nbytes=0))
        chance_here = random.Random(seed + 1)
        while len(alive) > crossing:
            events.append(Event(key=alive.pop(chance_here.randrange(len(alive))), nbytes=0))
    for _ in range(after):
        events.append(Event(key=key, nbytes=chance.randrange(1, 99)))
        key += 1
    return events


@given(
    first=some.integers(0, 30), blocks=some.integers(4, 30), iterations=some.integers(4, 7), after=some.integers(0, 30),
    seed=some.integers(0, 1000),
)  # fmt: skip
def test_an_iteration_is_found(first: int, blocks: int, iterations: int, after: int, seed: int) -> None:
    events = make_events(first, blocks, iterations, after, seed)
    period = find_period(events)
    assert period is not None
    assert period.length == 2 * blocks
    assert period.end - period.begin >= period.length
    buffers = list_iteration(events, period)
    check_buffers(buffers)
    assert blocks <= len(buffers) <= blocks + 2  # one that is there for longer than a period is there twice
    sizes = sorted(event.nbytes for event in events[first:] if event.nbytes)
    assert all(buffer.nbytes in sizes for buffer in buffers)


def test_what_crosses_wraps() -> None:
    events = make_events(3, 10, 5, 0, seed=7)
    period = find_period(events)
    assert period is not None
    assert 0 < sum(buffer.upper < buffer.lower for buffer in list_iteration(events, period)) <= 2


def test_two_that_alternate_are_one() -> None:
    events, key = [], 0
    for iteration in range(12):
        for nbytes in range(1, 20):
            events.append(Event(key=key, nbytes=nbytes * (3 if iteration % 2 else 1)))
            events.append(Event(key=key, nbytes=0))
            key += 1
    period = find_period(events)
    assert period is not None and period.length == 2 * 2 * 19


def test_a_block_that_outlives_an_iteration_is_there_always() -> None:
    events = []
    for index in range(60):
        events.append(Event(key=index, nbytes=100))
        events.append(Event(key=-index - 1, nbytes=7))
        events.append(Event(key=-index - 1, nbytes=0))
        if index >= 2:
            events.append(Event(key=index - 2, nbytes=0))
    period = find_period(events)
    assert period is not None and period.length == 4
    always = [buffer for buffer in list_iteration(events, period) if buffer.nbytes == 100]
    assert len(always) == 3 and all((buffer.lower, buffer.upper) == (0, 4) for buffer in always)


def test_nothing_repeats() -> None:
    assert find_period([]) is None
    assert find_period([Event(key=index, nbytes=index + 1) for index in range(100)]) is None


@pytest.mark.parametrize(
    "events",
    [
        [Event(key=1, nbytes=0)],
        [Event(key=1, nbytes=8), Event(key=1, nbytes=8)],
        [Event(key=1, nbytes=-8)],
        [Event(key=1, nbytes=8), Event(key=1, nbytes=0), Event(key=1, nbytes=0)],
    ],
)
def test_what_cannot_have_happened_is_refused(events: list[Event]) -> None:
    with pytest.raises(TraceError, match="event"):
        find_period(events)


def test_many_events_take_time_in_proportion() -> None:
    events = make_events(1000, 10_000, 10, 500, seed=3)
    begin = time.process_time()
    period = find_period(events)
    assert period is not None and period.length == 20_000
    assert time.process_time() - begin < 20
