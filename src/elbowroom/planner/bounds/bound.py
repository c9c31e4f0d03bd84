"""How long a step must take within a budget, whatever the plan: what a plan's time is to be compared with.

The plans meant are those that decide on the gaps of a `Drafter`; the time is the simulator's. The best bound is that of
the fluid linear programme (`fluid`); the others are what is left of it without one or the other kind of choice, and
tell what stands in the way.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.bounds.gap_arrays import Numbers, make_gap_arrays
from elbowroom.planner.problem import Problem, pose
from elbowroom.progress import announcing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Seconds that no plan within a budget can beat; infinite where no plan fits at all.

    Attributes:
        seconds: the greatest of those below that hold for every plan.
        compute_seconds: the plain step, with its hooks and the program's own time.
        link_seconds: with what cannot be replayed out before the worst tick, and back after it.
        fluid_seconds: with bytes and choices as if they were liquid.
        cover_seconds: of plans that only recompute; not a bound on others.
        floor_bytes: the smallest budget within which there is a plan, if the tier below may hold any amount.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    fluid_seconds: float
    cover_seconds: float
    floor_bytes: int

    def over(self, seconds: float) -> float:
        """How far a plan's time is above the bound, as a share of it; 0 for a step without time."""
        return seconds / self.seconds - 1 if self.seconds > 0 else 0.0


def find_bound(problem: Problem) -> Bound:
    """The bounds of one problem.

    Cost: two solutions of linear programmes (`fluid.solve_fluid`).
    """
    plain, floor_bytes = problem.plain.step_seconds, problem.floor.peak_bytes
    if floor_bytes > problem.budget_bytes:
        return Bound(
            seconds=math.inf, compute_seconds=plain, link_seconds=math.inf, fluid_seconds=math.inf,
            cover_seconds=math.inf, floor_bytes=floor_bytes,
        )  # fmt: skip
    if problem.plain.peak_bytes <= problem.budget_bytes:
        link = fluid = cover = plain
    else:
        joint, recomputing = solve_fluid(problem), solve_fluid(problem, offload=False)
        # There is a plan (the floor's): a solver that finds none has lost its way.
        fluid = plain if joint is None else joint.seconds
        cover = math.inf if recomputing is None else recomputing.seconds
        link = plain + _find_waiting(problem)
    return Bound(
        seconds=max(plain, link, fluid), compute_seconds=plain, link_seconds=link, fluid_seconds=fluid,
        cover_seconds=cover, floor_bytes=floor_bytes,
    )  # fmt: skip


def bound_plan(trace: Trace, costs: Costs, plan: Plan, host_bytes: int | None = None) -> float:
    """Seconds that no plan within the budget of this one can beat; infinite where the budget is below the floor.

    Raises:
        TraceError: the costs belong to another trace.
    """
    with announcing("proving a bound", f"{trace.name}, {len(trace.ops):,} ops"):
        return find_bound(pose(trace, costs, plan.budget_bytes, host_bytes=host_bytes)).seconds


def _find_waiting(problem: Problem) -> float:
    """Seconds that the step waits for copies, at the least.

    At each tick, what is over the budget and is not dropped has been copied out since the first save, and is yet to
    come back before the last need.
    """
    gap_arrays = make_gap_arrays(problem)
    moves = np.isfinite(gap_arrays.out_seconds + gap_arrays.back_seconds)
    if not moves.any():
        return 0.0
    live = np.array(problem.plain.live_bytes, dtype=float)
    begins = problem.drafter.replay.begins
    dropped = gap_arrays.free((gap_arrays.maker >= 0).astype(float), len(live))
    excess = np.maximum(0.0, live - problem.budget_bytes - dropped)
    now = begins[: len(live)]

    def pace(seconds: Numbers) -> float:
        return float((seconds / gap_arrays.nbytes)[moves].min())

    out = pace(gap_arrays.out_seconds) * excess - (now - begins[gap_arrays.claim_begins[moves].min()])
    back = pace(gap_arrays.back_seconds) * excess - (begins[gap_arrays.closes[moves].max()] - now)
    waiting = np.where(excess > 0, np.maximum(0.0, out) + np.maximum(0.0, back), 0.0)
    return float(waiting.max(initial=0.0))
