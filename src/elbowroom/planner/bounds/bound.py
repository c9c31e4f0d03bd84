"""Lower bound on the step time within a budget, over all plans.

It holds for plans that decide on the gaps of a `Drafter`, and on those of the model's state, timed by the simulator.
The best bound comes from the fluid linear program (`fluid`); the others drop one kind of choice, and show what limits
the step.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.bounds.gap_arrays import Numbers, count_unneeded_bytes, make_gap_arrays
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import Problem, make_lowest, pose
from elbowroom.planner.state.residence import fix_state
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

    If the model's state may move, its moves are part of the fluid relaxation, for a step that is like the one before.
    The bound on plans that only recompute counts it as away whenever no op uses it.

    Cost: two linear programs (`fluid.solve_fluid`); three if the state may move.
    """
    if problem.manages is Manages.EVERYTHING:
        bound = find_bound(_leave_state_out(problem))
        link = max(bound.link_seconds, find_state_link_seconds(problem))
        relaxed = solve_fluid(problem) if problem.floor.peak_bytes <= problem.budget_bytes else None
        fluid = bound.fluid_seconds if relaxed is None else max(bound.fluid_seconds, relaxed.seconds)
        return dataclasses.replace(
            bound, seconds=max(bound.seconds, link, fluid), link_seconds=link, fluid_seconds=fluid
        )
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
    manages = Manages.EVERYTHING if plan.state else Manages.ACTIVATIONS
    with announcing("proving a bound", f"{trace.name}, {len(trace.ops):,} ops"):
        return find_bound(pose(trace, costs, plan.budget_bytes, host_bytes=host_bytes, manages=manages)).seconds


def find_state_link_seconds(problem: Problem) -> float:
    """Return the least time that a step's reloads of the model's state take on the link.

    At each tick, what exceeds the budget with the activations at their lowest is state that is away. Each of its bytes
    returns once in every step, except for those of gradients that nothing reads any more.
    """
    drafter = problem.drafter
    trace, replay = drafter.replay.trace, drafter.replay
    lowest = make_lowest(drafter, problem.budget_bytes, Manages.ACTIVATIONS)
    excess = np.array(replay.run(lowest).live_bytes, dtype=np.int64) - problem.budget_bytes
    excess -= count_unneeded_bytes(problem)
    alignment = replay.costs.alignment_bytes  # blocks on the device are larger than what crosses the link
    padding = len(trace.state) * alignment
    return max(0, int(excess.max(initial=0)) - padding) / replay.costs.link.back_bytes_per_second


def _leave_state_out(problem: Problem) -> Problem:
    """Return the problem of the activations if the state took no room between its uses."""
    drafter = problem.drafter
    lowest = make_lowest(drafter, problem.budget_bytes, problem.manages)
    trace = fix_state(drafter.replay.trace, lowest.state)
    return pose(trace, drafter.replay.costs, problem.budget_bytes, min_offload_bytes=drafter.min_bytes,
                host_bytes=drafter.replay.host_bytes)  # fmt: skip


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
