"""Simulated annealing on choices, judged by the compiled simulator.

Moves change single gaps, or runs of consecutive similar gaps.

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
    """The gaps to decide on, and their permitted choices.

    Attributes:
        gaps: the gaps to draw from; larger ones are repeated, so they are drawn more often.
        allowed: whether a choice is permitted, by gap and choice.
        alike: the same gaps without repetition, grouped by kind and ordered by time within a kind.
        place: by gap, its index in `alike`; -1 if absent.
        kind: by index in `alike`.
        in_time: the same gaps, by their opens.
        rank: by gap, its index in `in_time`.
    """

    gaps: Array
    allowed: Array
    alike: Array
    place: Array
    kind: Array
    in_time: Array
    rank: Array


STEEPER = 1.003
"""Factor by which the penalty per byte changes each turn."""


class SweepLimits(NamedTuple):
    """Limits within which choices are judged; `slack` as for `sweep`."""

    budget_bytes: int
    host_bytes: int
    slack: float


@compiled
def find_excess(limits: SweepLimits, room: Sweep) -> int:
    """Return the bytes by which the last sweep exceeded the limits."""
    outcome = room.outcome[0]
    over = max(0, outcome.peak_bytes - limits.budget_bytes) + max(0, outcome.lower_bytes - limits.host_bytes)
    return int(over)


@compiled
def anneal(
    columns: Columns, space: SearchSpace, limits: SweepLimits, choices: Array, best: Array, hot: float, cold: float,
    turns: int, seed: int, price: Array, room: Sweep,
) -> float:  # fmt: skip
    """Change `choices` for `turns` turns while the temperature falls from `hot` to `cold` seconds.

    Excess bytes carry a penalty, which rises while there is any excess and falls otherwise: the search stays near the
    boundary of the feasible set.

    Args:
        best: set to the best feasible choices, if they beat its contents.
        price: array of one number: penalty in seconds per excess byte; updated in place, so a later call continues from
            it.

    Returns:
        The seconds of `best`; infinite if it does not fit.

    Cost: one sweep a turn.
    """
    budget, slack = limits.budget_bytes, limits.slack
    found = np.inf
    if sweep(columns, best, budget, slack, np.inf, room) and find_excess(limits, room) == 0:
        found = room.outcome[0].seconds
    if not sweep(columns, choices, budget, slack, np.inf, room):
        return found
    seconds, excess = room.outcome[0].seconds, find_excess(limits, room)
    before = choices.copy()
    state = seed
    heat = hot
    cooling = (cold / hot) ** (1.0 / max(1, turns))
    for turn in range(turns):
        if turn > 0:
            state = _change(space, choices, _advance(state))
            if _draw(state, 3) == 0:
                state = _change(space, choices, _advance(state))
        heat *= cooling
        price[0] *= STEEPER if excess > 0 else 1.0 / STEEPER
        state = _advance(state)
        # Draw the threshold first, so that the sweep can stop once it is too slow to be accepted.
        limit = seconds + price[0] * excess - heat * math.log((state + 1.0) / 2.0**48)
        accepted = bool(sweep(columns, choices, budget, slack, limit, room))
        if accepted:
            excess_now = find_excess(limits, room)
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
def polish(columns: Columns, space: SearchSpace, limits: SweepLimits, best: Array, sweeps: int, room: Sweep) -> float:
    """Change single gaps of `best` while that is faster, or equally fast with one move less.

    Args:
        sweeps: approximate upper limit on sweeps.

    Returns:
        The seconds of `best`; infinite if it does not fit.
    """
    budget, slack = limits.budget_bytes, limits.slack
    if not sweep(columns, best, budget, slack, np.inf, room) or find_excess(limits, room):
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
            fits = sweep(columns, best, budget, slack, found, room) and not find_excess(limits, room)
            if fits and (room.outcome[0].seconds < found or (choice == KEEP and was != KEEP)):
                found = room.outcome[0].seconds
                now = choice
                since = 0
        best[gap] = now
    return float(found)


@compiled
def try_all(columns: Columns, space: SearchSpace, limits: SweepLimits, best: Array, room: Sweep) -> float:
    """Set `best` to the fastest feasible choices, by enumeration.

    Returns:
        The seconds of `best`; infinite if it does not fit.

    Cost: a sweep for every combination.
    """
    found = polish(columns, space, limits, best, 0, room)
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
        is_feasible = sweep(columns, choices, limits.budget_bytes, limits.slack, found, room)
        if is_feasible and not find_excess(limits, room) and room.outcome[0].seconds < found:
            found = room.outcome[0].seconds
            _copy(choices, best)


@inlined
def _copy(source: Array, target: Array) -> None:
    """Copy element by element; assigning a slice would take numba seconds longer to compile."""
    for index in range(len(target)):
        target[index] = source[index]


@internal
def _advance(state: int) -> int:
    """Return the next state of a 48-bit linear congruential generator; global generators stay untouched."""
    return (state * 25214903917 + 11) & 0xFFFFFFFFFFFF


@internal
def _draw(state: int, count: int) -> int:
    """Return a number below `count`, from the high bits of a state, which are the more random ones."""
    return (state >> 16) % count


@internal
def _change(space: SearchSpace, choices: Array, state: int) -> int:
    """Exchange, copy or set some choices; return the next generator state."""
    state = _advance(state)
    gap = space.gaps[_draw(state, len(space.gaps))]
    place = space.place[gap]
    state = _advance(state)
    manner = _draw(state, 8)
    state = _advance(state)
    length = _draw_length(state)
    if manner < 5:
        state = _advance(state)
        reach = 17 if manner < 3 else 2 * len(space.alike) + 1
        other = place + _draw(state, reach) - reach // 2
        if other != place and 0 <= other < len(space.alike) and space.kind[other] == space.kind[place]:
            _exchange(space, choices, gap, space.alike[other], length, manner % 2 == 0)
            return state
    state = _advance(state)
    choice = _pick_other(choices[gap], _draw(state, 16))
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
    """Draw a run length: mostly 1; each doubling is a quarter as likely."""
    length, draw = 1, _draw(state, 1024)
    while draw < 256 and length < 64:
        length, draw = length * 2, draw * 2
    return length


@internal
def _exchange(space: SearchSpace, choices: Array, one: int, other: int, length: int, both_ways: bool) -> None:
    """Exchange the choices of two runs of similar gaps, or copy those of the second to the first.

    The runs begin at `one` and `other`, go on in order of time, and end at the first pair of different kinds.
    """
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
def _pick_other(choice: int, draw: int) -> int:
    """Return another choice, from a number below 16; the two special kinds of recomputation are rare."""
    manner = RECOMPUTE_OWN if draw < 2 else (RECOMPUTE_KEEP_INPUTS if draw < 4 else RECOMPUTE)
    if choice >= RECOMPUTE and manner != RECOMPUTE and manner != choice:
        return manner
    other = (min(choice, RECOMPUTE) + 1 + draw % 2) % 3
    return manner if other == RECOMPUTE else other
