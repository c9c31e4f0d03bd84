"""Improves choices by trying others on the compiled simulator: simulated annealing over single gaps and runs of alike.

Source: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing", Science 220, 1983.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from elbowroom._numba_loops import compiled, inlined, internal
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.segments import (
    CHOICES,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_KEEP_INPUTS,
    RECOMPUTE_OWN,
)
from elbowroom.simulator.compiled_loops.sweep import sweep
from elbowroom.simulator.compiled_loops.transit import Sweep


class SearchSpace(NamedTuple):
    """What may be changed.

    Attributes:
        gaps: those worth deciding on; the larger, the more often.
        allowed: per gap and choice.
        alike: the same gaps once each, those of one kind together and in order of time.
        place: per gap, where it is in `alike`; -1: not there.
        kind: per place.
        in_time: the same gaps by their opens.
        rank: per gap, where it is in `in_time`.
    """

    gaps: Array
    allowed: Array
    alike: Array
    place: Array
    kind: Array
    in_time: Array
    rank: Array


STEEPER = 1.003
"""By which the price of a byte changes from turn to turn."""


class SweepLimits(NamedTuple):
    """What choices are judged within; `slack` as for `sweep`."""

    budget_bytes: int
    host_bytes: int
    slack: float


@compiled
def find_excess(terms: SweepLimits, room: Sweep) -> int:
    """Bytes by which the last sweep did not fit."""
    outcome = room.outcome[0]
    over = max(0, outcome.peak_bytes - terms.budget_bytes) + max(0, outcome.lower_bytes - terms.host_bytes)
    return int(over)


@compiled
def anneal(
    columns: Columns, space: SearchSpace, terms: SweepLimits, choices: Array, best: Array, hot: float, cold: float, turns: int,
    seed: int, price: Array, room: Sweep,
) -> float:  # fmt: skip
    """Change `choices` for `turns` turns while temperatures fall from `hot` to `cold` seconds.

    Bytes that are too much have a price, which rises while there are any and falls while there are none: the search
    walks along the edge of what fits.

    Args:
        best: set to the best that fits, if it is better than what `best` holds.
        price: one number, seconds for every byte that is too much; goes on from here the next time.

    Returns:
        The seconds of `best`; infinite if it does not fit.

    Cost: one sweep a turn.
    """
    budget, slack = terms.budget_bytes, terms.slack
    found = np.inf
    if sweep(columns, best, budget, slack, np.inf, room) and find_excess(terms, room) == 0:
        found = room.outcome[0].seconds
    if not sweep(columns, choices, budget, slack, np.inf, room):
        return found
    seconds, excess = room.outcome[0].seconds, find_excess(terms, room)
    before = choices.copy()
    state, heat, cooling = seed, hot, (cold / hot) ** (1.0 / max(1, turns))
    for turn in range(turns):
        if turn > 0:
            state = _change(space, choices, _mix(state))
            if _draw(state, 3) == 0:
                state = _change(space, choices, _mix(state))
        heat *= cooling
        price[0] *= STEEPER if excess > 0 else 1.0 / STEEPER
        state = _mix(state)
        # Drawn first, so that a sweep can end as soon as it is too slow to be accepted.
        limit = seconds + price[0] * excess - heat * math.log((state + 1.0) / 2.0**48)
        accepted = bool(sweep(columns, choices, budget, slack, limit, room))
        if accepted:
            excess_now = find_excess(terms, room)
            accepted = room.outcome[0].seconds + price[0] * excess_now <= limit
        if not accepted:
            _copy(before, choices)
            continue
        _copy(choices, before)
        seconds, excess = room.outcome[0].seconds, excess_now
        if excess == 0 and seconds < found:
            found = seconds
            _copy(choices, best)
    return found


@compiled
def polish(columns: Columns, space: SearchSpace, terms: SweepLimits, best: Array, sweeps: int, room: Sweep) -> float:
    """Change single gaps of `best` while that is faster, or as fast with less to move.

    Args:
        sweeps: about so many at most.

    Returns:
        The seconds of `best`; infinite if it does not fit.
    """
    if not sweep(columns, best, terms.budget_bytes, terms.slack, np.inf, room) or find_excess(terms, room):
        return float(np.inf)
    found, since = room.outcome[0].seconds, 0
    place = len(space.alike)
    while sweeps > 0 and since < len(space.alike):
        place = place - 1 if place > 0 else len(space.alike) - 1
        since += 1
        gap = space.alike[place]
        was, now = best[gap], best[gap]
        for choice in range(CHOICES):
            if choice == was or not space.allowed[gap, choice]:
                continue
            best[gap] = choice
            sweeps -= 1
            fits = sweep(columns, best, terms.budget_bytes, terms.slack, found, room) and not find_excess(terms, room)
            if fits and (room.outcome[0].seconds < found or (choice == KEEP and was != KEEP)):
                found, now, since = room.outcome[0].seconds, choice, 0
        best[gap] = now
    return float(found)


@compiled
def try_all(columns: Columns, space: SearchSpace, terms: SweepLimits, best: Array, room: Sweep) -> float:
    """Set `best` to the best that fits of all there are.

    Returns:
        The seconds of `best`; infinite if it does not fit.

    Cost: a sweep for every combination.
    """
    found = polish(columns, space, terms, best, 0, room)
    choices = np.zeros(len(best), dtype=np.int8)
    while True:
        for gap in space.alike:
            choices[gap] = (choices[gap] + 1) % CHOICES
            if choices[gap] != 0:
                break
        if not choices.any():
            return found
        is_allowed = True
        for gap in space.alike:
            is_allowed = is_allowed and space.allowed[gap, choices[gap]]
        if not is_allowed:
            continue
        carried_out = sweep(columns, choices, terms.budget_bytes, terms.slack, found, room)
        if carried_out and not find_excess(terms, room) and room.outcome[0].seconds < found:
            found = room.outcome[0].seconds
            _copy(choices, best)


@inlined
def _copy(source: Array, target: Array) -> None:
    """Set every number of `target`: as an assignment to a slice, which takes seconds longer to compile."""
    for index in range(len(target)):
        target[index] = source[index]


@internal
def _mix(state: int) -> int:
    """The next of a sequence of numbers below 2**48 that look random; the user's own generators stay untouched."""
    return (state * 25214903917 + 11) & 0xFFFFFFFFFFFF


@internal
def _draw(state: int, count: int) -> int:
    """A number below `count`, from the better half of the bits."""
    return (state >> 16) % count


@internal
def _change(space: SearchSpace, choices: Array, state: int) -> int:
    """Exchange, copy or set some choices; returns the next state of the numbers."""
    state = _mix(state)
    gap = space.gaps[_draw(state, len(space.gaps))]
    place = space.place[gap]
    state = _mix(state)
    manner = _draw(state, 8)
    state = _mix(state)
    length = _draw_length(state)
    if manner < 5:
        state = _mix(state)
        reach = 17 if manner < 3 else 2 * len(space.alike) + 1
        other = place + _draw(state, reach) - reach // 2
        if other != place and 0 <= other < len(space.alike) and space.kind[other] == space.kind[place]:
            _transplant(space, choices, gap, space.alike[other], length, manner % 2 == 0)
            return state
    state = _mix(state)
    choice = _other(choices[gap], _draw(state, 16))
    if not space.allowed[gap, choice]:
        choice = KEEP if choices[gap] != KEEP else OFFLOAD
        if not space.allowed[gap, choice]:
            return state
    for position in range(place, min(place + length, len(space.alike))):
        if space.kind[position] != space.kind[place]:
            break
        if space.allowed[space.alike[position], choice]:
            choices[space.alike[position]] = choice
    return state


@internal
def _draw_length(state: int) -> int:
    """Mostly 1; twice as much a quarter as often."""
    length, draw = 1, _draw(state, 1024)
    while draw < 256 and length < 64:
        length, draw = length * 2, draw * 2
    return length


@internal
def _transplant(space: SearchSpace, choices: Array, one: int, other: int, length: int, both_ways: bool) -> None:
    """Give `one` and what follows it in time the choices of `other` and what follows that, while they are alike."""
    first, second = space.rank[one], space.rank[other]
    if first < second:
        length = min(length, second - first, len(space.in_time) - second)
    else:
        length = min(length, first - second, len(space.in_time) - first)
    for offset in range(length):
        one, other = space.in_time[first + offset], space.in_time[second + offset]
        if space.kind[space.place[one]] != space.kind[space.place[other]]:
            return
        mine, its = choices[one], choices[other]
        if not space.allowed[one, its] or (both_ways and not space.allowed[other, mine]):
            continue
        choices[one] = its
        if both_ways:
            choices[other] = mine


@internal
def _other(choice: int, draw: int) -> int:
    """Another choice, for a number below 16; the special manners of dropping are tried seldom."""
    manner = RECOMPUTE_OWN if draw < 2 else (RECOMPUTE_KEEP_INPUTS if draw < 4 else RECOMPUTE)
    if choice >= RECOMPUTE and manner != RECOMPUTE and manner != choice:
        return manner
    other = (min(choice, RECOMPUTE) + 1 + draw % 2) % 3
    return manner if other == RECOMPUTE else other
