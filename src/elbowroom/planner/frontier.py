"""Plans for several budgets and hosts at once, of which none is worse than it need be.

Searches for each budget on its own may find something better for a smaller budget than for a larger one. Here each
budget, with each host, gets the best of all that was found and fits. So a larger budget never gives a slower plan, and
a smaller one never a higher peak; nor is a plan slower with a larger host, where there is no disk behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import plan
from elbowroom.simulator.replay import Replay

Result = tuple[int, float]
"""Peak bytes and step seconds."""


def choose(results: Sequence[Result | None], budgets: Sequence[int]) -> list[int | None]:
    """For each budget the place of the fastest result within it, of equals that with the lowest peak; None: of none."""
    order = sorted((result[1], result[0], place) for place, result in enumerate(results) if result is not None)
    return [next((place for _, peak, place in order if peak <= budget), None) for budget in budgets]


def plan_all(
    trace: Trace,
    costs: Costs,
    budgets: Sequence[int],
    *,
    strategy: str = "auto",
    hosts: Sequence[int | None] = (None,),
) -> tuple[tuple[Plan | None, ...], ...]:
    """For each host, a plan for each budget; None where there is none.

    Args:
        strategy: as for `problem.plan`.
        hosts: what the tier below may hold, as `host_bytes` of `problem.plan`.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: it has no such option.
        TraceError: the costs belong to another trace.

    Cost: a plan for each budget with each host, and a forecast of each plan with each host.
    """
    made = [_try(trace, costs, budget, strategy, host_bytes) for host_bytes in hosts for budget in budgets]
    plans = list(dict.fromkeys(each for each in made if each is not None))
    return tuple(_choose_for(trace, costs, plans, budgets, host_bytes) for host_bytes in hosts)


def _choose_for(
    trace: Trace, costs: Costs, plans: list[Plan], budgets: Sequence[int], host_bytes: int | None
) -> tuple[Plan | None, ...]:
    """The best of the plans that fit, for each budget."""
    replay = Replay(trace, costs, host_bytes=host_bytes)
    most_below = None if replay.overflow is not None else host_bytes
    results: list[Result | None] = []
    for forecast in map(replay.run, plans):
        fits = most_below is None or forecast.lower_tier_bytes <= most_below
        results.append((forecast.peak_bytes, forecast.step_seconds) if fits else None)
    places = choose(results, budgets)
    return tuple(
        None if place is None else dataclasses.replace(plans[place], budget_bytes=budget)
        for place, budget in zip(places, budgets, strict=True)
    )


def _try(trace: Trace, costs: Costs, budget_bytes: int, strategy: str, host_bytes: int | None) -> Plan | None:
    try:
        return plan(trace, costs, budget_bytes, strategy=strategy, host_bytes=host_bytes)
    except Infeasible:
        return None
