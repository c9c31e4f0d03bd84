"""Looks for the best choices within a budget: several starts, annealed side by side, the best of them to the end."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.planner.annealing import Space, Terms, anneal, find_excess, polish, try_all
from elbowroom.planner.composer import Composer
from elbowroom.planner.fluid import FluidSolution, solve_fluid
from elbowroom.planner.pricing import find_space
from elbowroom.planner.problem import Problem
from elbowroom.simulator.columns import Array
from elbowroom.simulator.compiled import IS_COMPILED
from elbowroom.simulator.segments import CHOICES, KEEP, OFFLOAD, RECOMPUTE
from elbowroom.simulator.sweep import sweep

logger = logging.getLogger(__name__)

WORK = 12_000_000 if IS_COMPILED else 60_000
"""Events swept in one search: about two seconds. A count and not a time, so that plans repeat."""

FEWEST_TURNS = 300
ENOUGH = 20_000 if IS_COMPILED else 2_000
TURNS_A_GAP = 100
"""More sweeps than `ENOUGH` and than so many a gap are not worth it."""

TIGHTER = 0.94
"""Of the budget, for which the relaxation is solved as well: whole storages and whole transfers need some room."""

SLACK = 0.5
SLACKS = (0.0, 0.5, 2.0)

HEATS = ((4e-4, 5e-6), (1e-2, 1e-5))
"""Temperatures at the beginning and at the end of a start, in plain steps."""

HARDLY = 0.1

FINISH = 2
"""Starts' worth of turns for going on from the best."""

POLISH = 1
"""Starts' worth of turns for single changes in the end."""

WINDOWS = 40
"""Where the relaxation looks to begin with: it need not be as close here as where it proves a bound."""

PIECES = 8
"""Of every walk, between which an interruption is noticed."""

ROUND_UP = 0.3
"""A larger fraction of a gap counts as all of it."""


@dataclasses.dataclass(slots=True)
class _Best:
    choices: Array
    seconds: float


def explore(problem: Problem, strategy: str, effort: float = 1.0) -> Plan | None:
    """The plan of the best choices found within the budget; None if none were.

    An interruption (Ctrl-C) ends the search and not the program: what was best so far is returned.
    """
    composer = Composer(problem)
    columns, room = composer.columns, composer.room
    best = _Best(np.full(len(columns.gaps), OFFLOAD, dtype=np.int8), np.inf)
    try:
        _search(problem, composer, best, effort)
    except KeyboardInterrupt:
        logger.warning("planning was interrupted: going on with the best plan so far")
    terms = _terms(problem)
    slack, fastest = SLACK, np.inf
    for other in SLACKS:
        if not sweep(columns, best.choices, problem.budget_bytes, other, np.inf, room) or find_excess(terms, room):
            continue
        if room.outcome[0].seconds < fastest:
            slack, fastest = other, float(room.outcome[0].seconds)
    plan = composer.make_plan(best.choices, strategy, slack)
    return plan if problem.fits(problem.drafter.replay.run(plan)) else None


def _search(problem: Problem, composer: Composer, best: _Best, effort: float) -> None:
    columns, room = composer.columns, composer.room
    # A step without compute has no time to measure heat by, but moving everything takes some.
    scale = max(problem.plain.step_seconds, HARDLY * problem.floor.step_seconds)
    space, terms = find_space(columns, problem.budget_bytes, room.segments), _terms(problem)
    if not len(space.alike):
        return
    enough = max(ENOUGH, TURNS_A_GAP * len(space.alike))
    turns = int(effort * min(max(FEWEST_TURNS, WORK // len(columns.events)), enough))
    if CHOICES ** len(space.alike) <= turns:
        best.seconds = try_all(columns, space, terms, best.choices, room)
        return
    walk = _Walk(composer, space, terms, best, scale)
    for start in _simple_starts(space):
        walk.look_at(start)
    fluids = [fluid for fluid in _relax(problem) if fluid is not None]
    found = [_round(composer, fluid, space) for fluid in fluids] or [best.choices.copy()]
    prices = float(fluids[0].byte_prices.sum()) if fluids else 0.0
    price = 2 * max(prices, 1e-3 * scale / problem.budget_bytes)
    share = turns // (len(HEATS) * len(found) + FINISH + POLISH)
    for hot, cold in HEATS:
        for start in found:
            walk.go(start.copy(), hot, cold, share, price)
    walk.go(best.choices.copy(), *HEATS[0], FINISH * share, price)
    best.seconds = polish(columns, space, terms, best.choices, POLISH * share, room)


def _relax(problem: Problem) -> list[FluidSolution | None]:
    tight_bytes = max(int(TIGHTER * problem.budget_bytes), problem.floor.peak_bytes)
    tighter = dataclasses.replace(problem, budget_bytes=tight_bytes)
    return [solve_fluid(each, windows=WINDOWS) for each in (problem, tighter)]


def _simple_starts(space: Space) -> list[Array]:
    """Everything away in one manner, or in the other where that is possible."""
    starts = []
    for first, otherwise in ((OFFLOAD, OFFLOAD), (RECOMPUTE, OFFLOAD), (RECOMPUTE, KEEP)):
        choices = np.zeros(len(space.allowed), dtype=np.int8)
        choices[space.alike] = np.where(space.allowed[space.alike, first], first, otherwise)
        starts.append(choices)
    return starts


class _Walk:
    """Anneals from one start after another; seeds differ, and are the same from run to run."""

    def __init__(self, composer: Composer, space: Space, terms: Terms, best: _Best, scale: float) -> None:
        self._composer, self._space, self._terms, self._best = composer, space, terms, best
        self._scale = scale
        self._seed = 0

    def look_at(self, choices: Array) -> None:
        """Take choices as they are, if they are better."""
        self.go(choices, *HEATS[0], 0, 0.0)

    def go(self, choices: Array, hot: float, cold: float, turns: int, price: float) -> None:
        """From `choices`, in pieces, between which an interruption is noticed."""
        prices = np.asarray([price])
        cooling = (cold / hot) ** (1 / PIECES)
        for piece in range(PIECES):
            heat = hot * self._scale * cooling**piece
            self._seed += 1
            self._best.seconds = anneal(
                self._composer.columns, self._space, self._terms, choices, self._best.choices, heat, heat * cooling,
                max(1, turns // PIECES), self._seed, prices, self._composer.room,
            )  # fmt: skip


def _round(composer: Composer, fluid: FluidSolution, space: Space) -> Array:
    """Whole choices of a solution in fractions."""
    place = {key: index for index, key in enumerate(fluid.keys)}
    order = np.asarray([place.get(key, len(place)) for key in composer.keys], dtype=np.int64)
    recompute, offload = (np.append(share, 0.0)[order] for share in (fluid.recomputed, fluid.offloaded))
    choices = np.where(offload >= ROUND_UP, OFFLOAD, KEEP)
    drop = (recompute >= np.maximum(ROUND_UP, offload)) & space.allowed[:, RECOMPUTE]
    return np.where(drop, RECOMPUTE, choices).astype(np.int8)


def _terms(problem: Problem) -> Terms:
    host_bytes = 1 << 62 if problem.host_bytes is None else problem.host_bytes
    return Terms(budget_bytes=problem.budget_bytes, host_bytes=host_bytes, slack=SLACK)
