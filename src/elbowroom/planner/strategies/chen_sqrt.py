"""Keep what the stages of the forward pass begin with, drop the rest, and run each stage once more for its gradients.

With n saved storages, there are about sqrt(n) stages of equal bytes. If that does not fit, the paper's search follows:
x is the bytes that stages begin with and y the largest stage, when every stage is as small as possible; stages of
sqrt(x y), and six sizes from that over sqrt(2) to that times sqrt(2). Of those that fit, the fastest is taken. If
everything fits, everything stays.

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, sections 4.3 and
4.4 without the recursion, algorithm 3 (`planner.heuristics.stages`) and appendix A. The paper has no budget for the
step and takes the plan that needs the least memory; here that plan is returned if none fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.stages import Cutter, draft_stages
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Draft

GRID = 6
"""Sizes tried around sqrt(x y)."""


def make_plan(problem: Problem) -> Plan:
    """Return the plan with about sqrt(n) stages, or the best one of the search."""
    if problem.fits(problem.plain):
        return _finish(problem, {})
    cutter = Cutter(problem.drafter.replay.trace)
    lowest: tuple[int, Plan] | None = None
    fitting: list[tuple[float, Plan]] = []
    for index, budget_bytes in enumerate(_list_budgets(cutter)):
        plan = _finish(problem, draft_stages(problem.drafter, cutter.cut(budget_bytes)))
        forecast = problem.drafter.replay.run(plan)
        if problem.fits(forecast):
            fitting.append((forecast.step_seconds, plan))
            if index == 0:
                break
        if lowest is None or forecast.peak_bytes < lowest[0]:
            lowest = forecast.peak_bytes, plan
    if fitting:
        return min(fitting, key=lambda each: each[0])[1]
    assert lowest is not None
    return lowest[1]


def _list_budgets(cutter: Cutter) -> Iterator[float]:
    """Yield the bytes of a stage: for sqrt(n) stages, and then those of the search."""
    yield cutter.saved_bytes / max(1, math.isqrt(cutter.saved_count))
    smallest = cutter.cut(0)
    middle = math.sqrt(smallest.kept_bytes * smallest.largest_bytes)
    yield middle
    for index in range(GRID):
        yield middle * 2 ** (index / (GRID - 1) - 0.5)


def _finish(problem: Problem, draft: Draft) -> Plan:
    plan = problem.drafter.finish(draft, "chen_sqrt", problem.budget_bytes)
    while plan is None:
        # A replay may need a dropped storage that cannot be replayed then.
        draft.popitem()
        plan = problem.drafter.finish(draft, "chen_sqrt", problem.budget_bytes)
    return plan
