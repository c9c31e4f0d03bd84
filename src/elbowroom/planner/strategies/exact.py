"""Small traces only: the fastest of all choices, proved; what other strategies are measured against.

Keep, offload, recompute with the first replay that makes it, or recompute anew: each for every gap whose absence frees
bytes at a time when there are too many, all other gaps kept. Every vector of these choices is either carried out by
the simulator or proved to be no better (`planner.searching.branch_and_bound`). When moves begin and end follows from
the choices and the budget, as for `auto`: it is exact over choices and three ways of timing, and not over all ticks
that moves could have. It begins with what `auto` finds, and replays that share ops are joined, which may make it faster
than any vector.

Where the search ends before its time, how far the best is above what the rest could be is logged. How far it is above
what any plan could be is for `planner.bounds.bound` to say.

Source: as an oracle for small graphs it stands where the joint integer programmes of the literature stand, POET's for
one (S. G. Patil, P. Jain, P. Dutta, I. Stoica, J. Gonzalez, "POET: Training neural networks on tiny devices with
integrated rematerialization and paging", ICML 2022, section 5). Its search is ours.

Cost: exponential in the gaps.
"""

from __future__ import annotations

import logging
import math

from elbowroom.errors import UsageError
from elbowroom.ir.plan import Plan
from elbowroom.planner.bounds.gap_arrays import make_gap_arrays
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.merge_replays import merge_replays
from elbowroom.planner.searching.branch_and_bound import CLOSE, BranchAndBound
from elbowroom.planner.searching.choice_search import search_choices

logger = logging.getLogger(__name__)


def make_plan(problem: Problem, *, nodes: int = 100, most_gaps: int = 64) -> Plan:
    """The fastest plan of all choices within the budget.

    Args:
        nodes: of the search, after which the best so far is returned.
        most_gaps: to decide on.

    Raises:
        UsageError: there are more gaps to decide on.
    """
    if problem.fits(problem.plain):
        plan = problem.drafter.finish({}, "exact", problem.budget_bytes)
        assert plan is not None  # it drops nothing
        return plan
    count = len(make_gap_arrays(problem).keys)
    if count > most_gaps:
        raise UsageError(
            f"exact is for small traces: this one has {count} gaps to decide on within {problem.budget_bytes} bytes, "
            f"and most_gaps is {most_gaps}; use auto, which says how far it is above the bound, or raise most_gaps"
        )
    start = merge_replays(problem, search_choices(problem, "exact").plan)
    forecast = problem.drafter.replay.run(start)
    if not problem.fits(forecast) and problem.floor.peak_bytes > problem.budget_bytes:
        return start
    brancher = BranchAndBound(problem, forecast.step_seconds if problem.fits(forecast) else math.inf)
    found = brancher.search(nodes)
    if found.bound_seconds < found.seconds * (1 - CLOSE):
        logger.warning(
            "exact ended after %d nodes: its best choices take %.6g s, and others may take %.2f %% less",
            found.nodes, found.seconds, 100 * (1 - found.bound_seconds / found.seconds),
        )  # fmt: skip
    if found.choices is None:
        return start
    return merge_replays(problem, brancher.vectors.make_plan(found.choices, "exact", found.slack))
