"""The default: keep, offload or recompute, jointly, as near to the best there can be as a search gets.

1. The joint fluid relaxation (`planner.bounds.fluid`) says what an ideal link and divisible storages would do. Its
   solution is nearly whole; it is rounded, at this budget and at a slightly smaller one, since whole storages need some
   room.
2. From there choices are annealed on the compiled simulator: gaps change alone, in exchange with one of their kind, or
   together with their neighbours in kind, and stretches of them are exchanged with, or copied to, others that look
   alike, so that what is learnt about one repeated block serves all. What does not fit costs, and the price follows
   the search, so that it walks along the edge of the budget. Several walks run side by side.
   Meanwhile Capuchin's policy is asked, too (not for the longest traces). Then walks go on from the best of all that,
   again and again while it is far from the bound. Where the step is a chain of stages, its best schedule of replays is
   computed (`planner.heuristics.revolve`): within little memory replays read what other replays made, which no choice
   says. If it is ahead in the end, it is the plan, and walks go on from what choices can say of it.
3. The best is made into a plan with exact ticks; replays that repeat each other's ops are joined where that is faster.

A storage that is dropped is back with the first replay that makes it, or made again at its own need, whatever was
replayed before, or kept until the last replay that reads it: which of these is part of the choice. Where nothing fits,
the plan holds as little as can be, and `plan` says what that needs.

Source: relaxing the choice and rounding it is Checkmate's (P. Jain et al., "Checkmate: Breaking the memory wall with
optimal tensor rematerialization", MLSys 2020), the search over whole-step simulations HOME's (S. He et al., "HOME: A
holistic GPU memory management framework for deep learning", IEEE Transactions on Computers 72, 2023); what is new is
their union: offload in the relaxation, a simulator in machine code as the judge, and the walk along the edge.

Cost: a linear program of some hundred rows an event, and a number of sweeps that falls with the trace's length.
"""

from __future__ import annotations

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem
from elbowroom.planner.searching.choice_search import Moves
from elbowroom.planner.searching.nested_budgets import solve


def make_plan(problem: Problem, *, moves: Moves = "both", effort: float = 1.0) -> Plan:
    """The fastest plan found within the budget, or the lowest if none is; the same input gives the same plan.

    Args:
        moves: how storages may leave.
        effort: how many sweeps are spent, over the usual number.
    """
    if problem.fits(problem.plain):
        plan = problem.drafter.finish({}, "auto", problem.budget_bytes)
        assert plan is not None  # it drops nothing
        return plan
    return solve(problem, "auto", moves, effort)
