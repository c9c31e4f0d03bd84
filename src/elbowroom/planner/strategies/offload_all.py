"""Everything that may leave is offloaded, and reloaded just in time; on demand where that would not fit."""

from __future__ import annotations

from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.draft import Option
from elbowroom.planner.problem import Problem, lowest_draft


def make_plan(problem: Problem) -> Plan:
    """Offload in every gap."""
    drafter = problem.drafter
    plans = [
        drafter.finish(draft, "offload_all", problem.budget_bytes)
        for draft in (
            dict.fromkeys(drafter.gaps, Option(Choice.OFFLOAD)),
            dict.fromkeys(drafter.gaps, Option(Choice.OFFLOAD, late=True)),
            lowest_draft(drafter),
        )
    ]
    made = [plan for plan in plans if plan is not None]  # all of them: they drop nothing
    return next((plan for plan in made if drafter.replay.run(plan).peak_bytes <= problem.budget_bytes), made[-1])
