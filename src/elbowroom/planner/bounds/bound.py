"""Lower bound on the step time within a budget, over all plans.

It holds for plans that decide on the gaps of a `Drafter`, timed by the simulator. The best bound comes from the fluid
linear program (`fluid`); the others drop one kind of choice, and show what limits the step.
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
    """Seconds that no plan within a budget can beat; infinite if no plan fits.

    Attributes:
        seconds: the greatest of the bounds below that hold for every plan.
        compute_seconds: the plain step, with its hooks and the program's own time.
        link_seconds: what cannot be replayed is copied out before the worst tick, and back after it.
        fluid_seconds: the fluid relaxation: bytes and choices are divisible.
        cover_seconds: for plans that only recompute; not a bound on others.
        floor_bytes: the smallest budget that has a plan, if the lower tier is unlimited.
    """

    seconds: float
    compute_seconds: float
    link_seconds: float
    fluid_seconds: float
    cover_seconds: float
    floor_bytes: int

    def over(self, seconds: float) -> float:
        """Return the relative excess of a plan's time over the bound; 0 for a step without time."""
        return seconds / self.seconds - 1 if self.seconds > 0 else 0.0


def find_bound(problem: Problem) -> Bound:
    """Compute the bounds of one problem.

    Cost: two linear programs (`fluid.solve_fluid`).
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
        # The floor's plan fits, so a solver that finds none has failed numerically.
        fluid = plain if joint is None else joint.seconds
        cover = math.inf if recomputing is None else recomputing.seconds
        link = plain + _find_waiting(problem)
    return Bound(
        seconds=max(plain, link, fluid), compute_seconds=plain, link_seconds=link, fluid_seconds=fluid,
        cover_seconds=cover, floor_bytes=floor_bytes,
    )  # fmt: skip


def bound_plan(trace: Trace, costs: Costs, plan: Plan, host_bytes: int | None = None) -> float:
    """Return the seconds that no plan within this plan's budget can beat; infinite below the floor.

    Raises:
        TraceError: the costs belong to another trace.
    """
    with announcing("proving a bound", f"{trace.name}, {len(trace.ops):,} ops"):
        return find_bound(pose(trace, costs, plan.budget_bytes, host_bytes=host_bytes)).seconds


def _find_waiting(problem: Problem) -> float:
    """Return the least time that the step waits for copies, in seconds.

    At each tick, the bytes over the budget that are not dropped have been copied out since the first save, and have to
    return before the last need.
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

    def seconds_per_byte(seconds: Numbers) -> float:
        return float((seconds / gap_arrays.nbytes)[moves].min())

    out = seconds_per_byte(gap_arrays.out_seconds) * excess - (now - begins[gap_arrays.claim_begins[moves].min()])
    back = seconds_per_byte(gap_arrays.back_seconds) * excess - (begins[gap_arrays.closes[moves].max()] - now)
    waiting = np.where(excess > 0, np.maximum(0.0, out) + np.maximum(0.0, back), 0.0)
    return float(waiting.max(initial=0.0))
