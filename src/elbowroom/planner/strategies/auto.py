"""The default: keep, offload or recompute, jointly, where the peak is.

1. Always at the tick where the forecast peak is, take the choices with the least added time per byte freed there;
   forecast again.
2. Undo choices that no longer pay, dearest first; then exchange one kind for the other where that is faster.

Where step 1 cannot go on, the search starts from the plan with the lowest peak there is and only undoes.

Source: the rule of attacking the forecast's peak follows the observation that moving what is not at the peak changes
nothing; the joint choice by added time per byte generalises the filter and director of DELTA (Tang et al., "DELTA:
Dynamically Optimizing GPU Memory beyond Tensor Recomputation", 2022) to whole-step knowledge.

Cost: some hundreds of forecasts, each linear in saves and needs.
"""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem, lowest_draft
from elbowroom.planner.search import Search


def make_plan(problem: Problem) -> Plan:
    """The fastest plan found within the budget; the same input gives the same plan."""
    search = Search(problem.drafter, problem.budget_bytes, "auto")
    if problem.floor.peak_bytes > problem.budget_bytes:
        search.restart(lowest_draft(problem.drafter))
        return search.plan  # no plan holds less
    if not search.descend():
        search.restart(lowest_draft(problem.drafter))
    search.refine()
    return search.plan
