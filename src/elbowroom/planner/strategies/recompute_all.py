"""Drop everything that can be replayed, except what runs of the forward pass begin with; nothing is offloaded.

As few runs as fit the budget: with one, the first backward op recomputes everything at once.
"""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.forward_runs import draft_runs
from elbowroom.planner.problem import Problem


def make_plan(problem: Problem) -> Plan:
    """Return the plan with the fewest runs that fits; the one with the lowest peak if none does."""
    drafter = problem.drafter
    best: tuple[int, Plan] | None = None
    for draft in draft_runs(drafter):
        plan = drafter.finish(draft, "recompute_all", problem.budget_bytes)
        while plan is None:
            # A replay may need a dropped storage that cannot be replayed then.
            draft.popitem()
            plan = drafter.finish(draft, "recompute_all", problem.budget_bytes)
        peak_bytes = drafter.replay.run(plan).peak_bytes
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, plan
        if peak_bytes <= problem.budget_bytes:
            return plan
    if best is not None:
        return best[1]
    plan = drafter.finish({}, "recompute_all", problem.budget_bytes)
    assert plan is not None  # it drops nothing
    return plan
