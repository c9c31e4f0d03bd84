"""The default: a joint search over keep, offload and recompute, close to the optimum.

1. The joint fluid relaxation (`planner.bounds.fluid`) assumes an ideal link and divisible storages. Its solution is
   nearly integral; it is rounded, at this budget and at slightly smaller ones, since whole storages need some extra
   memory.
2. From there, simulated annealing on the compiled simulator improves the choices. Gaps change alone, in exchange with
   another of their kind, or together with neighbours of their kind; runs of gaps exchange choices with similar runs, or
   copy them, so that an improvement in one repeated block reaches all. Choices that exceed the budget pay a penalty
   that adapts to the search, so that it stays near the boundary of the feasible set. Several runs proceed in parallel;
   unless the trace is long, Capuchin's plan is a start as well. Further runs continue from the best result while it is
   far from the bound. If the step is a chain of stages, its best schedule of replays is computed as well
   (`planner.heuristics.revolve`): with little memory, replays read what other replays produced, which no choice vector
   expresses. If that schedule is ahead at the end, it is the plan, and runs continue from the choices that approximate
   it.
3. The best choices become a plan with exact ticks; replays that share ops are merged if that is faster.

If everything is managed, this search plans the activations beside moves of the model's state: those of the relaxation,
which then covers the state as well, and several shares of the state that are away (`planner.state.search`).

A dropped storage returns with the first replay that produces it, or is recomputed at its own need, whatever was
replayed before; in the latter case it may also stay until the last replay that reads it. The choice says which of
these. If nothing fits, the plan has the lowest peak found, and the error that `plan` raises states the budget it needs.

Source: relaxing the choice and rounding it is Checkmate's (P. Jain et al., "Checkmate: Breaking the memory wall with
optimal tensor rematerialization", MLSys 2020), the search over whole-step simulations HOME's (S. He et al., "HOME: A
holistic GPU memory management framework for deep learning", IEEE Transactions on Computers 72, 2023). Ours: their
combination, with offload in the relaxation, a simulator in machine code as the judge, and the search along the boundary
of the feasible set.

Cost: a linear program of some hundred rows an event, and a number of sweeps that falls with the trace's length.
"""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem
from elbowroom.planner.searching.choice_search import Moves, search_choices
from elbowroom.planner.searching.nested_budgets import solve
from elbowroom.planner.state import search


def make_plan(problem: Problem, *, moves: Moves = "both", effort: float = 1.0) -> Plan:
    """Return the fastest plan found within the budget, or the one with the lowest peak if none fits. Deterministic.

    Args:
        moves: how storages may leave the device.
        effort: the number of sweeps, as a multiple of the usual one.
    """
    if problem.fits(problem.plain):
        plan = problem.drafter.finish({}, "auto", problem.budget_bytes)
        assert plan is not None  # it drops nothing
        return plan
    return solve(problem, "auto", moves, effort)


def make_joint_plan(problem: Problem, *, moves: Moves = "both", effort: float = 1.0) -> Plan:
    """Return the fastest plan found that also moves the model's state. Deterministic.

    Args:
        moves, effort: as for `make_plan`; the state is only offloaded.
    """
    if problem.fits(problem.plain):
        return make_plan(problem)
    return search.solve(problem, "auto", make_plan, _make_quickly, moves, effort)


def _make_quickly(problem: Problem, *, moves: Moves, effort: float) -> Plan:
    """Return a plan without looking at smaller problems."""
    if problem.fits(problem.plain):
        return make_plan(problem)
    return search_choices(problem, "auto", moves, effort, joined=1).plan
