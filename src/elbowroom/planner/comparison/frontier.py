"""Plans for several budgets and hosts at once, so that more memory never gives a slower plan.

Separate searches may find a better plan for a smaller budget than for a larger one. Here each budget, with each host,
gets the best of all plans found that fit. So a larger budget never gives a slower plan, and a smaller one never a
higher peak; nor is a plan slower with a larger host. If there is a disk behind the host, a plan for a smaller host uses
no more of a larger one (`Plan.host_bytes`).
"""

from __future__ import annotations

import dataclasses
import math
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
    """Return, for each budget, the index of the fastest result within it (ties: of the lowest peak), or None."""
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
    """Return, for each host, a plan for each budget; None if there is none.

    Args:
        strategy: as for `problem.plan`.
        hosts: capacities of the lower tier, as `host_bytes` of `problem.plan`.

    Raises:
        UnknownMember: there is no such strategy.
        UsageError: it has no such option.
        TraceError: the costs belong to another trace.

    Cost: a plan for each budget with each host, and a forecast of each plan with each host.
    """
    made = [_try(trace, costs, budget, strategy, host_bytes) for host_bytes in hosts for budget in budgets]
    plans = list(dict.fromkeys(each for each in made if each is not None))
    found: list[tuple[Plan, Result | None]] = []
    chosen: dict[int | None, tuple[Plan | None, ...]] = {}
    for host_bytes in sorted(hosts, key=lambda size: math.inf if size is None else size):
        found += _forecast(trace, costs, plans, host_bytes)
        places = choose([result for _, result in found], budgets)
        chosen[host_bytes] = tuple(
            None if place is None else dataclasses.replace(found[place][0], budget_bytes=budget)
            for place, budget in zip(places, budgets, strict=True)
        )
    return tuple(chosen[host_bytes] for host_bytes in hosts)


def _forecast(
    trace: Trace, costs: Costs, plans: list[Plan], host_bytes: int | None
) -> list[tuple[Plan, Result | None]]:
    """Return each plan's result with a host and with any larger one; None if it needs more of the host."""
    replay = Replay(trace, costs, host_bytes=host_bytes)
    has_disk = replay.overflow is not None
    found: list[tuple[Plan, Result | None]] = []
    for plan_ in plans:
        forecast = replay.run(plan_)
        fits = has_disk or host_bytes is None or forecast.lower_tier_bytes <= host_bytes
        overflow = replay.find_overflow(plan_)
        kept_to = overflow.host_bytes if overflow is not None and forecast.disk_bytes else None
        limited = dataclasses.replace(plan_, host_bytes=kept_to)
        found.append((limited, (forecast.peak_bytes, forecast.step_seconds) if fits else None))
    return found


def _try(trace: Trace, costs: Costs, budget_bytes: int, strategy: str, host_bytes: int | None) -> Plan | None:
    try:
        return plan(trace, costs, budget_bytes, strategy=strategy, host_bytes=host_bytes)
    except Infeasible:
        return None
