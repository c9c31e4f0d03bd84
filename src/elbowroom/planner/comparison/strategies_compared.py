"""Compares strategies on one step within several budgets.

        budgets                      strategies
20%  30%  ...  100%   x   auto  vdnn  autoswap:score=doa  ...   ->  one Entry each
  '---- bound of each ----'
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from elbowroom.errors import Infeasible, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.comparison.frontier import choose
from elbowroom.planner.options import Manages, find_managed, find_strategy
from elbowroom.planner.problem import find_slices, fit_problem, plan, pose
from elbowroom.planner.slicing.choice import Slices
from elbowroom.simulator.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """Forecast of a plan: the totals of `ir.forecast.Forecast`, without its per-tick data."""

    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    stall_seconds: float
    offloaded_bytes: int
    reloaded_bytes: int
    lower_tier_bytes: int
    disk_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        """Bytes over the link, both directions together."""
        return self.offloaded_bytes + self.reloaded_bytes

    def over(self, seconds: float) -> float:
        """Return the step's time as a multiple of another one."""
        return self.step_seconds / seconds if seconds else math.inf if self.step_seconds else 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One strategy within one budget.

    Attributes:
        outcome: forecast of its plan; None if that does not fit.
        needed_bytes: the peak of its plan, or the budget it would need to find one.
        needed_host_bytes: peak bytes of its plan in the lower tier; 0 if it does not fit the device.
        planning_seconds: from the trace to the judged plan.
        refusal: the reason why the strategy did not plan: the step is too large for it, or a package is not installed;
            "" if it did. `needed_bytes` is 0 then.
    """

    outcome: PlanOutcome | None
    needed_bytes: int
    needed_host_bytes: int
    planning_seconds: float
    refusal: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The result of one strategy within one budget, next to the bound.

    Attributes:
        strategy: as given, with its options.
        plain_seconds: the step without a plan.
        bound_seconds: no plan within this budget takes less; infinite if there is none.
    """

    strategy: str
    budget_bytes: int
    plain_seconds: float
    bound_seconds: float
    attempt: Attempt

    @property
    def outcome(self) -> PlanOutcome | None:
        """Forecast of the plan; None if there is none."""
        return self.attempt.outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The entries of one step on one machine.

    Attributes:
        name: of the captured step.
        trace_digest: of its trace.
        profile_name: of the machine.
        plain_peak_bytes, plain_seconds: of the step without a plan.
        smallest_bytes: the smallest budget that works if ops run as a whole.
        manages: storages that plans may move.
        slices: ops that may run in slices.
        entries: by budget, then in the order of the strategies.
    """

    name: str
    trace_digest: str
    profile_name: str
    plain_peak_bytes: int
    plain_seconds: float
    smallest_bytes: int
    manages: str = Manages.ACTIVATIONS
    slices: Slices = Slices.NONE
    entries: tuple[Entry, ...]

    def list_budgets(self) -> tuple[int, ...]:
        """Return each budget once."""
        return tuple(dict.fromkeys(entry.budget_bytes for entry in self.entries))

    def list_strategies(self) -> tuple[str, ...]:
        """Return each strategy once."""
        return tuple(dict.fromkeys(entry.strategy for entry in self.entries))

    def find_entries(self, *, budget_bytes: int | None = None, strategy: str | None = None) -> tuple[Entry, ...]:
        """Return the entries of one budget, of one strategy, or both."""
        return tuple(
            entry
            for entry in self.entries
            if budget_bytes in (None, entry.budget_bytes) and strategy in (None, entry.strategy)
        )


def attempt(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    strategy: str,
    *,
    host_bytes: int | None = None,
    manages: str = Manages.ACTIVATIONS,
    slices: Slices = Slices.NONE,
) -> Attempt:
    """Plan once, and time it.

    Args:
        host_bytes: capacity of the lower tier, or the bytes after which copies go on to a disk (`problem.plan`).
        manages: storages that may move (`problem.plan`).
        slices: ops that may run in slices (`problem.plan`).

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: it has no such option, or rejects this step.
        TraceError: the costs belong to another trace.
    """
    begin = time.perf_counter()
    try:
        made = plan(
            trace, costs, budget_bytes, strategy=strategy, host_bytes=host_bytes, manages=manages, slices=slices
        )
    except Infeasible as error:
        seconds = time.perf_counter() - begin
        on_host = error.needed_bytes <= budget_bytes
        return Attempt(
            outcome=None,
            needed_bytes=error.needed_bytes,
            needed_host_bytes=error.needed_host_bytes if on_host else 0,
            planning_seconds=seconds,
        )
    seconds = time.perf_counter() - begin
    forecast = simulate(trace, costs, made, host_bytes=host_bytes)
    return Attempt(
        outcome=summarize(forecast),
        needed_bytes=forecast.peak_bytes,
        needed_host_bytes=forecast.lower_tier_bytes,
        planning_seconds=seconds,
    )


def try_strategy(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    strategy: str,
    *,
    host_bytes: int | None = None,
    manages: str = Manages.ACTIVATIONS,
    slices: Slices = Slices.NONE,
) -> Attempt:
    """Call `attempt`; if the strategy rejects the step, return an attempt with the reason.

    Raises:
        TraceError: the costs belong to another trace.
    """
    begin = time.perf_counter()
    try:
        return attempt(trace, costs, budget_bytes, strategy, host_bytes=host_bytes, manages=manages, slices=slices)
    except UsageError as error:
        seconds = time.perf_counter() - begin
        return Attempt(outcome=None, needed_bytes=0, needed_host_bytes=0, planning_seconds=seconds, refusal=str(error))


def compare(
    trace: Trace,
    costs: Costs,
    budgets: Sequence[int],
    strategies: Sequence[str],
    *,
    host_bytes: int | None = None,
    manages: str = Manages.ACTIVATIONS,
    slices: Slices | str = Slices.NONE,
) -> Iterator[Entry]:
    """Yield the entry of every strategy within every budget as soon as it is planned, budget by budget.

    A strategy that rejects the step does not end the comparison: its entry has the reason (`Attempt.refusal`).

    Args:
        host_bytes, manages, slices: as for `attempt`. The bounds are for all plans that move these storages, and have
            the slices that fit.

    Raises:
        UnknownMember: there is no such strategy, or nothing of that name to manage or to slice. Raised before anything
            is planned.
        UsageError: a strategy has no such option. Raised before anything is planned.
        TraceError: the costs belong to another trace.

    Cost: one plan an entry, and one bound a budget.
    """
    for strategy in strategies:
        find_strategy(strategy, find_managed(strategy, manages))
    return _compare(trace, costs, budgets, strategies, host_bytes, manages, find_slices(slices))


def _compare(
    trace: Trace,
    costs: Costs,
    budgets: Sequence[int],
    strategies: Sequence[str],
    host_bytes: int | None,
    manages: str,
    slices: Slices,
) -> Iterator[Entry]:
    for budget_bytes in budgets:
        problem = pose(trace, costs, budget_bytes, host_bytes=host_bytes, manages=Manages(manages))
        fitting = fit_problem(problem, slices)
        bound_seconds = math.inf if fitting is None else find_bound(fitting).seconds
        for strategy in strategies:
            yield Entry(
                strategy=strategy,
                budget_bytes=budget_bytes,
                plain_seconds=problem.plain.step_seconds,
                bound_seconds=bound_seconds,
                attempt=try_strategy(
                    trace, costs, budget_bytes, strategy, host_bytes=host_bytes, manages=manages, slices=slices
                ),
            )


def even_out(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Give each entry the best outcome of its strategy that fits its budget, whichever budget it was found for."""
    best: dict[tuple[str, int], PlanOutcome] = {}
    for strategy in {entry.strategy for entry in entries}:
        own = [entry for entry in entries if entry.strategy == strategy]
        outcomes = [entry.outcome for entry in own]
        results = [None if each is None else (each.peak_bytes, each.step_seconds) for each in outcomes]
        for entry, place in zip(own, choose(results, [entry.budget_bytes for entry in own]), strict=True):
            if place is not None and (outcome := outcomes[place]) is not None:
                best[strategy, entry.budget_bytes] = outcome
    return tuple(
        dataclasses.replace(entry, attempt=_take_over(entry.attempt, found))
        if (found := best.get((entry.strategy, entry.budget_bytes))) is not None
        else entry
        for entry in entries
    )


def _take_over(attempt: Attempt, outcome: PlanOutcome) -> Attempt:
    needed_bytes = attempt.needed_bytes or outcome.peak_bytes  # 0 if the strategy rejected the step
    return dataclasses.replace(attempt, outcome=outcome, needed_bytes=needed_bytes, refusal="")


def find_front(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return the Pareto front of peak and seconds, by increasing peak; the first of equals."""
    front: list[Entry] = []
    fastest = math.inf
    for entry, outcome in sorted(
        ((entry, entry.outcome) for entry in entries if entry.outcome is not None),
        key=lambda each: (each[1].peak_bytes, each[1].step_seconds),
    ):
        if outcome.step_seconds < fastest:
            fastest = outcome.step_seconds
            front.append(entry)
    return tuple(front)


def find_fastest(entries: Sequence[Entry]) -> Entry | None:
    """Return the entry with the shortest step, the first of equals; None if none fits."""
    fitting = [(entry.outcome.step_seconds, entry) for entry in entries if entry.outcome is not None]
    return min(fitting, key=lambda each: each[0])[1] if fitting else None


def summarize(forecast: Forecast) -> PlanOutcome:
    """Return the totals of a forecast, without its per-tick data."""
    return PlanOutcome(**{field.name: getattr(forecast, field.name) for field in dataclasses.fields(PlanOutcome)})
