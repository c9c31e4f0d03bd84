"""Choices with lower and lower peaks, for searches that have no feasible start.

    budget of the relaxation    80 %   64 %   51 %  ...  of the plain peak, until it is infeasible
    rounded                     each gap is dropped until the first replay that produces it, or (OWN) until its own need

If everything may be offloaded, offloading everything fits if anything does. If not, because the lower tier is limited
or only recomputation is allowed, the relaxation rounded at the budget itself often exceeds it: it counts no memory for
replays, and intermediate results that a replay keeps for a later need stay. The sequence of budgets does not depend on
the budget, so whatever is found within one budget is found again within a larger one.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from elbowroom.planner.bounds.fluid import FluidSolution, solve_fluid
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.simulator.compiled_loops.columns import Array
from elbowroom.simulator.compiled_loops.segments import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN, find_segments
from elbowroom.simulator.compiled_loops.sweep import sweep

STEP = 0.8
"""Ratio of one budget to the previous one."""

WINDOWS = 40
"""Pivots of the relaxation (`fluid.solve_fluid`)."""

ROUND_UP = 0.3
"""A share of a gap of at least this counts as all of it."""

MOST_MENDED = 64
"""Drops that `mend` undoes one by one; after that, it undoes all."""


def list_low(
    problem: Problem, vectors: ChoiceVectorPlanner, allowed: Array, *, recompute: bool, offload: bool
) -> list[Array]:
    """Return feasible choices, those of higher budgets first.

    Cost: a linear program per budget, at most about twenty.
    """
    found: list[Array] = []
    budget_bytes = int(STEP * problem.plain.peak_bytes)
    while budget_bytes > 0:
        lower = dataclasses.replace(problem, budget_bytes=budget_bytes)
        fluid = solve_fluid(lower, windows=WINDOWS, recompute=recompute, offload=offload)
        if fluid is None:
            break
        rounded = round_shares(vectors, fluid, allowed)
        found += [
            rounded,
            mend(vectors, np.where(rounded == RECOMPUTE, RECOMPUTE_OWN, rounded).astype(np.int8), allowed),
        ]
        budget_bytes = int(STEP * budget_bytes)
    return found


def round_shares(vectors: ChoiceVectorPlanner, fluid: FluidSolution, allowed: Array) -> Array:
    """Round a fractional solution to feasible choices."""
    place = {key: index for index, key in enumerate(fluid.keys)}
    order = np.asarray([place.get(key, len(place)) for key in vectors.keys], dtype=np.int64)
    recompute, offload = (np.append(share, 0.0)[order] for share in (fluid.recomputed, fluid.offloaded))
    choices = np.where(offload >= ROUND_UP, OFFLOAD, KEEP)
    drop = (recompute >= np.maximum(ROUND_UP, offload)) & allowed[:, RECOMPUTE]
    choices = np.where(drop, RECOMPUTE, choices)
    return mend(vectors, np.where(allowed[np.arange(len(choices)), choices], choices, KEEP).astype(np.int8), allowed)


def mend(vectors: ChoiceVectorPlanner, choices: Array, allowed: Array) -> Array:
    """Return the choices without drops that have no replay next to the others; without any drop if there are many."""
    for _ in range(MOST_MENDED):
        if sweep(vectors.columns, choices, 0, 0.0, np.inf, vectors.room):
            return choices
        gap = find_segments(vectors.columns, vectors.room.segments)
        choices[gap] = OFFLOAD if allowed[gap, OFFLOAD] else KEEP
    return np.where(choices >= RECOMPUTE, KEEP, choices).astype(np.int8)
