"""Keep everything: the plain step, with Elbowroom attached."""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem


def make_plan(problem: Problem) -> Plan:
    """Return a plan without moves, whatever the budget."""
    plan = problem.drafter.finish({}, "keep_all", problem.budget_bytes)
    assert plan is not None  # it drops nothing
    return plan
