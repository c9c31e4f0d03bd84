"""Improves choices by trying others on the compiled simulator: simulated annealing over single gaps and runs of alike.

Source: S. Kirkpatrick, C. D. Gelatt, M. P. Vecchi, "Optimization by simulated annealing", Science 220, 1983.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from elbowroom.simulator.columns import Array, Columns
from elbowroom.simulator.compiled import compiled
from elbowroom.simulator.segments import KEEP
from elbowroom.simulator.sweep import sweep
from elbowroom.simulator.transit import Sweep


class Space(NamedTuple):
    """What may be changed.

    Attributes:
        gaps: those worth deciding on.
        allowed: per gap and choice.
        alike: the same gaps, those of one kind together and in order of time.
        place: per gap, where it is in `alike`; -1: not there.
        kind: per place.
    """

    gaps: Array
    allowed: Array
    alike: Array
    place: Array
    kind: Array


class Terms(NamedTuple):
    """How choices are judged: seconds, and seconds for every byte that is too much."""

    budget_bytes: int
    host_bytes: int
    slack: float
    penalty: float


@compiled
def score(columns: Columns, choices: Array, terms: Terms, room: Sweep) -> float:
    """Seconds of the step, more where it does not fit; infinite if the choices cannot be carried out."""
    if not sweep(columns, choices, terms.budget_bytes, terms.slack, room):
        return np.inf
    outcome = room.outcome[0]
    excess = max(0, outcome.peak_bytes - terms.budget_bytes) + max(0, outcome.lower_bytes - terms.host_bytes)
    return outcome.seconds + terms.penalty * excess


@compiled
def anneal(
    columns: Columns, space: Space, terms: Terms, choices: Array, best: Array, hot: float, cold: float, turns: int,
    seed: int, room: Sweep,
) -> float:  # fmt: skip
    """Change `choices` for `turns` turns while temperatures fall from `hot` to `cold` seconds.

    Args:
        best: set to the best that fits, if it is better than what `best` holds.

    Returns:
        The seconds of `best`; infinite if it does not fit.

    Cost: one sweep a turn.
    """
    found = score(columns, best, terms, room)
    if not _fits(terms, room):
        found = np.inf
    now = score(columns, choices, terms, room)
    if _fits(terms, room) and now < found:
        found = now
        best[:] = choices
    before = choices.copy()
    state = seed
    cooling = (cold / hot) ** (1.0 / max(1, turns))
    heat = hot
    for _ in range(turns):
        heat *= cooling
        state = _mix(state)
        changes = 1 + (state >> 8) % 3 // 2
        for _ in range(changes):
            state = _change(space, choices, state)
        tried = score(columns, choices, terms, room)
        state = _mix(state)
        if tried <= now or (tried < np.inf and math.exp((now - tried) / heat) * 2147483648.0 > state):
            now = tried
            before[:] = choices
            if tried < found and _fits(terms, room):
                found = tried
                best[:] = choices
        else:
            choices[:] = before
    return found


@compiled
def _fits(terms: Terms, room: Sweep) -> bool:
    outcome = room.outcome[0]
    return bool(outcome.peak_bytes <= terms.budget_bytes and outcome.lower_bytes <= terms.host_bytes)


@compiled
def _mix(state: int) -> int:
    """The next of a sequence of numbers below 2**31 that look random; the machine's own generators stay untouched."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


@compiled
def _change(space: Space, choices: Array, state: int) -> int:
    """Give one gap another choice, and sometimes the next ones of its kind the same."""
    state = _mix(state)
    gap = space.gaps[(state >> 4) % len(space.gaps)]
    state = _mix(state)
    choice = (choices[gap] + 1 + (state >> 10) % 2) % 3
    if not space.allowed[gap, choice]:
        choice = KEEP if choices[gap] != KEEP else 3 - choice
        if not space.allowed[gap, choice]:
            return state
    state = _mix(state)
    length = 1
    draw = (state >> 6) % 1024
    while draw < 256 and length < 64:
        length, draw = length * 2, draw * 2
    place = space.place[gap]
    for position in range(place, min(place + length, len(space.alike))):
        other = space.alike[position]
        if space.kind[position] != space.kind[place]:
            break
        if space.allowed[other, choice]:
            choices[other] = choice
    return state
