"""The problem that a strategy is given, and the checks that every plan passes."""

from __future__ import annotations

import dataclasses
import functools

from elbowroom._family import names
from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import InternalError, UnknownMember
from elbowroom.ir.arguments import check_amount, check_amounts, check_kinds
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner import strategies
from elbowroom.planner.infeasible import explain_infeasible, note_slices
from elbowroom.planner.options import Manages, find_managed, find_strategy
from elbowroom.planner.schedule.draft import Draft, Drafter, Option
from elbowroom.planner.slicing.choice import CutChooser, SlicedStep, Slices
from elbowroom.planner.slicing.least_bytes import find_largest_need
from elbowroom.planner.state.scheduler import StateScheduler
from elbowroom.progress import announcing
from elbowroom.simulator.planned import PreparedTrace

MIN_OFFLOAD_BYTES = 1 << 14
"""Smaller storages are never worth a move."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One trace on one machine within one budget, with what strategies need prepared.

    Attributes:
        budget_bytes: the device's.
        host_bytes: what the tier below may hold at once; None for any amount. Where a disk lies behind that tier it is
            None too: what has no room there goes on to the disk, at the price that `drafter.replay` knows.
        drafter: makes plans of drafts; `drafter.replay` forecasts them.
        plain: forecast of the step without moves.
        floor: forecast of holding as little as can be; no plan has a lower peak.
        manages: storages that plans may move.
    """

    budget_bytes: int
    host_bytes: int | None
    drafter: Drafter
    plain: Forecast
    floor: Forecast
    manages: Manages = Manages.ACTIVATIONS

    def fits(self, forecast: Forecast) -> bool:
        """Tell whether a forecast is within the budget of every tier."""
        within_host = self.host_bytes is None or forecast.lower_tier_bytes <= self.host_bytes
        return within_host and forecast.peak_bytes <= self.budget_bytes


def plan(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    *,
    strategy: str = "auto",
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
    host_bytes: int | None = None,
    manages: Manages | str = Manages.ACTIVATIONS,
    slices: Slices | str = Slices.EXACT,
) -> Plan:
    """Make a plan whose forecast is within `budget_bytes` on the device and `host_bytes` below it.

    Args:
        strategy: a name, with options where wanted: "autoswap:score=doa".
        min_offload_bytes: smaller storages always stay.
        host_bytes: what the tier below may hold at once; None for any amount. A limit where the costs have no link
            further down; else what is more goes to the disk, and takes longer.
        manages: "activations", or "everything": model state may leave as well (if `options.moves_state(strategy)`).
        slices: ops that may run in slices if no plan for whole ops fits.

    Raises:
        Infeasible: no plan of this strategy is; it names the tier, and the smallest budget that works.
        UnknownMember: there is no such strategy, or no such choice of `manages` or `slices`.
        UsageError: it has no such option, or an amount of bytes or the type of an argument means nothing.
        TraceError: the trace is inconsistent, the costs belong to another one, or a figure is invalid.
    """
    check_kinds(trace=(trace, Trace), costs=(costs, Costs))
    check_amount("budget_bytes", budget_bytes)
    check_amounts(min_offload_bytes=min_offload_bytes, host_bytes=host_bytes)
    manages = find_managed(strategy, manages)
    make_plan = find_strategy(strategy, manages)
    check_trace(trace)
    pose_within = functools.partial(
        pose, budget_bytes=budget_bytes, min_offload_bytes=min_offload_bytes, host_bytes=host_bytes, manages=manages
    )
    problem = pose_within(trace, costs)
    step = slice_step(problem, find_slices(slices))
    whole_bytes = problem.floor.peak_bytes
    if step is not None:
        trace = step.sliced.trace
        costs = step.costs
        problem = pose_within(trace, costs)
    with announcing("planning a step", f"{trace.name}, {len(trace.ops):,} ops"):
        made = make_plan(problem)
    check(trace, made)
    forecast = problem.drafter.replay.run(made)
    can_offload_all = problem.floor.peak_bytes <= budget_bytes and problem.host_bytes is None
    if forecast.peak_bytes > budget_bytes and strategy == "auto" and can_offload_all:
        raise InternalError(
            f"auto stopped at {forecast.peak_bytes} bytes, above the budget of {budget_bytes} and the floor of "
            f"{problem.floor.peak_bytes}"
        )
    if not problem.fits(forecast):
        error = explain_infeasible(
            trace, costs, made, forecast, host_bytes=problem.host_bytes,
            needed_host_bytes=_count_needed_below(problem, forecast),
        )  # fmt: skip
        raise error if step is None else note_slices(error, step.budget_bytes, whole_bytes)
    return made if step is None else dataclasses.replace(made, cuts=step.cuts)


def find_slices(slices: Slices | str) -> Slices:
    """Return which ops may run in slices, given its name.

    Raises:
        UnknownMember: there is no such choice.
    """
    if slices not in list(Slices):
        raise UnknownMember("choice of ops to slice", str(slices), tuple(Slices))
    return Slices(slices)


def fit_problem(problem: Problem, slices: Slices | str) -> Problem | None:
    """Return the problem, of the step in slices if whole ops do not fit the budget; None if slices do not either.

    Raises:
        UnknownMember: there is no such choice of `slices`.
    """
    kinds = find_slices(slices)
    if problem.floor.peak_bytes <= problem.budget_bytes:
        return problem
    if (step := fit_slices(problem, kinds)) is None:
        return None
    return pose(
        step.sliced.trace, step.costs, problem.budget_bytes, min_offload_bytes=problem.drafter.min_bytes,
        host_bytes=problem.host_bytes, manages=problem.manages,
    )  # fmt: skip


def slice_step(problem: Problem, slices: Slices) -> SlicedStep | None:
    """Return the step in slices if it does not fit otherwise; the lowest one there is if it does not fit then either.

    None if ops run as a whole.
    """
    if problem.floor.peak_bytes <= problem.budget_bytes:
        return None
    if (step := fit_slices(problem, slices)) is not None:
        return step
    lowest = [step for each in _list_choosers(problem, slices) if (step := each.find_lowest()) is not None]
    return min(lowest, key=lambda step: step.budget_bytes, default=None)


def fit_slices(problem: Problem, slices: Slices) -> SlicedStep | None:
    """Return the step in slices that fits the budget; None if there is none."""
    found = (chooser.choose(problem.budget_bytes) for chooser in _list_choosers(problem, slices))
    return next((step for step in found if step is not None), None)


def _list_choosers(problem: Problem, slices: Slices) -> list[CutChooser]:
    replay = problem.drafter.replay
    if slices is Slices.NONE or not replay.trace.slicing:
        return []

    def find_floor(trace: Trace, costs: Costs) -> Forecast:
        drafter = Drafter(PreparedTrace(trace, costs), problem.drafter.min_bytes)
        return drafter.replay.run(make_lowest(drafter, problem.budget_bytes, problem.manages))

    # Of an op whose slices are summed, other slices may be smaller.
    kinds = (Slices.ANY, Slices.EXACT) if slices is Slices.ANY else (slices,)
    _, least_bytes = find_largest_need(replay.trace, problem.manages, slices)
    return [CutChooser(replay.trace, replay.costs, find_floor, problem.floor, each, least_bytes) for each in kinds]


def pose(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    *,
    min_offload_bytes: int = MIN_OFFLOAD_BYTES,
    host_bytes: int | None = None,
    manages: Manages = Manages.ACTIVATIONS,
) -> Problem:
    """Prepare a problem."""
    manages = Manages(manages)  # of a string, too
    drafter = Drafter(PreparedTrace(trace, costs, host_bytes=host_bytes), min_offload_bytes)
    plain = drafter.finish({}, "plain", budget_bytes)
    assert plain is not None  # it drops nothing
    lowest = make_lowest(drafter, budget_bytes, manages)
    return Problem(
        budget_bytes=budget_bytes,
        host_bytes=None if drafter.replay.overflow is not None else host_bytes,
        drafter=drafter,
        plain=drafter.replay.run(plain),
        floor=drafter.replay.run(lowest),
        manages=manages,
    )


def lowest_draft(drafter: Drafter) -> Draft:
    """Everything that may leave leaves at once and comes back on demand: the lowest peak there is."""
    return dict.fromkeys(drafter.gaps, Option(Choice.OFFLOAD, release_now=True, on_demand=True))


def make_lowest(drafter: Drafter, budget_bytes: int, manages: Manages) -> Plan:
    """Return the plan with the lowest peak, whatever it holds below: each storage is there only while it is used."""
    lowest = drafter.finish(lowest_draft(drafter), "floor", budget_bytes)
    assert lowest is not None  # it drops nothing
    if manages is Manages.EVERYTHING:
        state = StateScheduler(drafter.replay, drafter.min_bytes).move_all()
        return dataclasses.replace(lowest, state=state)
    return lowest


def _count_needed_below(problem: Problem, forecast: Forecast) -> int:
    """Return the bytes that the lower tier must hold: for this plan, or for the lowest peak if the limit is lower."""
    if problem.host_bytes is None or problem.floor.peak_bytes > problem.budget_bytes:
        return 0
    nearest = forecast if forecast.peak_bytes <= problem.budget_bytes else problem.floor
    if not problem.drafter.replay.costs.further_links:
        return nearest.lower_tier_bytes
    return min(nearest.lower_tier_bytes, count_least_host_bytes())  # the rest goes to the disk


def list_strategies() -> tuple[str, ...]:
    """The names of all strategies."""
    return names(strategies)
