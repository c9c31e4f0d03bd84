"""Offload everything that may leave, and reload it just in time; on demand if that would not fit."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.problem import Problem, lowest_draft
from elbowroom.planner.schedule.draft import Option


def make_plan(problem: Problem) -> Plan:
    """Return a plan that offloads in every gap; if the link is too slow for a gap, the step waits."""
    drafter = problem.drafter

    def offload_all(usual: Option) -> Plan:
        draft = dict.fromkeys(drafter.gaps, usual)
        while True:
            plan = drafter.finish(draft, "offload_all", problem.budget_bytes)
            assert plan is not None  # it drops nothing
            left_out = draft.keys() - {(decision.storage, decision.gap) for decision in plan.decisions}
            if not left_out:
                return plan
            draft |= dict.fromkeys(left_out, dataclasses.replace(usual, release_now=True))  # these are never left out

    plans = [offload_all(Option(Choice.OFFLOAD)), offload_all(Option(Choice.OFFLOAD, on_demand=True))]
    lowest = drafter.finish(lowest_draft(drafter), "offload_all", problem.budget_bytes)
    assert lowest is not None
    return next((plan for plan in plans if drafter.replay.run(plan).peak_bytes <= problem.budget_bytes), lowest)
