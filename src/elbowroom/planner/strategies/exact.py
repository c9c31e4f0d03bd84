"""Small traces only: the proven fastest of all choices, as a reference for other strategies.

Each gap whose absence frees bytes where the plain step exceeds the budget has four choices: keep, offload, recompute
with the first replay that produces it, or recompute at its own need; all other gaps are kept. Every vector of these
choices is either simulated or proved to be no better (`planner.searching.branch_and_bound`). The choices and the budget
determine when moves begin and end, as for `auto`: the result is exact over choices and three ways of timing, not over
all possible ticks of moves. The search begins with the plan of `auto`. Replays that share ops are merged, which may
make the plan faster than any vector.

If the search stops early, the log states how far the best plan is above the bound on the rest. `planner.bounds.bound`
gives the bound over all plans.

Source: it serves as an oracle for small graphs, as the joint integer programs of the literature do, for example POET's
(S. G. Patil, P. Jain, P. Dutta, I. Stoica, J. Gonzalez, "POET: Training neural networks on tiny devices with integrated
rematerialization and paging", ICML 2022, section 5). Its search is ours.

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
    """Return the fastest plan of all choices within the budget.

    Args:
        nodes: nodes of the search tree, after which the best plan so far is returned.
        most_gaps: the most gaps to decide on.

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
            f"but most_gaps is {most_gaps}; use auto, or raise most_gaps"
        )
    start = merge_replays(problem, search_choices(problem, "exact").plan)
    forecast = problem.drafter.replay.run(start)
    if not problem.fits(forecast) and problem.floor.peak_bytes > problem.budget_bytes:
        return start
    brancher = BranchAndBound(problem, forecast.step_seconds if problem.fits(forecast) else math.inf)
    found = brancher.search(nodes)
    if found.bound_seconds < found.seconds * (1 - CLOSE):
        logger.warning(
            "exact stopped after %d nodes: its best choices take %.6g s; others may take up to %.2f %% less",
            found.nodes, found.seconds, 100 * (1 - found.bound_seconds / found.seconds),
        )  # fmt: skip
    if found.choices is None:
        return start
    return merge_replays(problem, brancher.vectors.make_plan(found.choices, "exact", found.slack))
