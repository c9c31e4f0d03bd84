"""Plans for several budgets at once, of which none is worse than it need be.

Searches for each budget on its own may find something better for a smaller budget than for a larger one. Here each
budget gets the best of all that was found and is within it. So a larger budget never gives a slower plan, and a smaller
one never a higher peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import plan
from elbowroom.simulator.replay import simulate

Result = tuple[int, float]
"""Peak bytes and step seconds."""


def choose(results: Sequence[Result | None], budgets: Sequence[int]) -> list[int | None]:
    """For each budget the place of the fastest result within it, of equals that with the lowest peak; None: of none."""
    order = sorted((result[1], result[0], place) for place, result in enumerate(results) if result is not None)
    return [next((place for _, peak, place in order if peak <= budget), None) for budget in budgets]


def plan_all(
    trace: Trace, costs: Costs, budgets: Sequence[int], *, strategy: str = "auto", host_bytes: int | None = None
) -> tuple[Plan | None, ...]:
    """A plan for each budget; None where there is none.

    Args:
        strategy, host_bytes: as for `problem.plan`.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: it has no such option.
        TraceError: the costs belong to another trace.

    Cost: one plan a budget.
    """
    made = [_try(trace, costs, budget, strategy, host_bytes) for budget in budgets]
    results: list[Result | None] = []
    for each in made:
        forecast = None if each is None else simulate(trace, costs, each, host_bytes=host_bytes)
        results.append(None if forecast is None else (forecast.peak_bytes, forecast.step_seconds))
    chosen = [None if place is None else made[place] for place in choose(results, budgets)]
    return tuple(
        None if each is None else dataclasses.replace(each, budget_bytes=budget)
        for each, budget in zip(chosen, budgets, strict=True)
    )


def _try(trace: Trace, costs: Costs, budget_bytes: int, strategy: str, host_bytes: int | None) -> Plan | None:
    try:
        return plan(trace, costs, budget_bytes, strategy=strategy, host_bytes=host_bytes)
    except Infeasible:
        return None
