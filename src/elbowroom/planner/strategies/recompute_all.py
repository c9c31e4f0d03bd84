"""Everything that can be replayed from what must stay is dropped; the rest is kept."""

from __future__ import annotations

from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.draft import Draft, Option
from elbowroom.planner.problem import Problem


def make_plan(problem: Problem) -> Plan:
    """Drop each storage, in order of its save, that can still be brought back when those before it are dropped."""
    drafter = problem.drafter
    draft: Draft = {}
    dropped: set[int] = set()
    for key, gap in sorted(drafter.gaps.items(), key=lambda item: (item[1].opens, item[0])):
        if key[1] == 0 and drafter.closures.find(gap.storage, gap.closes, dropped.__contains__) is not None:
            draft[key] = Option(Choice.RECOMPUTE)
            dropped.add(gap.storage)
    plan = drafter.finish(draft, "recompute_all", problem.budget_bytes)
    while plan is None:
        # A storage saved early may turn out to be needed by one that cannot be replayed without it.
        draft.popitem()
        plan = drafter.finish(draft, "recompute_all", problem.budget_bytes)
    return plan
