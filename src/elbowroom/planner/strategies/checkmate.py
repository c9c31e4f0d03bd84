"""Checkmate: least recomputation within the budget, by integer programming; nothing is offloaded.

1. The saved storages become a small graph: at most `stages` nodes that are kept, dropped and recomputed as a whole, and
   at most as many windows of the backward pass (`planner.ilp.recompute_graph`).
2. A mixed-integer program decides which nodes are carried into which window, and which are recomputed there
   (`planner.ilp.recompute_program`). After `nodes` nodes of the search tree (or, as a last resort, after `seconds`),
   the best solution so far is used, or the rounded relaxation if there is none. The log states its gap
   (`planner.ilp.solver_limits`).
3. A node that is not carried between two uses is dropped and replayed when it is needed. An intermediate result of a
   replay stays only if the solution carries it until then.
4. The graph is coarse. If the plan exceeds the budget, the program is solved again under a lower limit; if it has no
   solution, under a higher one. If the plan still does not fit, more is dropped, the most bytes per second first.
5. If recomputing whole runs of the forward pass (`planner.heuristics.forward_runs`) is faster than the plan of the
   coarse graph, or that plan does not fit, the runs are recomputed instead.

Source: P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez, "Checkmate:
Breaking the memory wall with optimal tensor rematerialization", MLSys 2020. Not carried over: a stage for each op,
which beyond some hundred ops is more than can be solved in time. Ours: the graph, and steps 4 and 5.

Cost: the program is exponential in the graph, hence its limits; the rest is linear in the ops replayed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping

from elbowroom.errors import UsageError
from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.forward_runs import draft_runs
from elbowroom.planner.heuristics.msps import Recomputation
from elbowroom.planner.ilp.recompute_graph import make_graph
from elbowroom.planner.ilp.recompute_program import RecomputeProgram, Solution
from elbowroom.planner.ilp.solver_limits import LAST_RESORT_SECONDS, SolverLimits
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Draft, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.realize import RealizedChoices, realize
from elbowroom.planner.schedule.timing import CopyTimetable

GAP = 5e-3
"""Relative gap of the recomputed seconds at which a solution counts as optimal."""

MOST_SOLUTIONS = 3
"""Programs solved, each under another limit."""

LEAST_SLACK = 0.01
"""Share of the budget that may stay unused; beyond it, a plan that uses more memory is sought."""

GROWTH = 1.1
"""Factor on the limit while the program has no solution."""

MOST_REPAIRS = 100
"""Rounds of dropping more."""


def make_plan(problem: Problem, *, stages: int = 30, nodes: int = 10, seconds: float = LAST_RESORT_SECONDS) -> Plan:
    """Return the faster of the program's plan and one that recomputes whole runs; the lowest peak of runs if none fits.

    Args:
        stages: stages of the forward pass that the program distinguishes.
        nodes: nodes of the solver's search tree, after which its best solution so far is used.
        seconds: time limit of the solver, as a last resort.

    Raises:
        UsageError: `stages` is less than 3, or `nodes` or `seconds` is not positive.
    """
    if stages < 3:
        raise UsageError(f"checkmate needs at least 3 stages, not {stages}")
    limits = SolverLimits(gap=GAP, nodes=nodes, seconds=seconds)
    in_runs = _recompute_runs(problem)
    if problem.plain.peak_bytes <= problem.budget_bytes:
        return in_runs  # without any run
    realized = _Rematerialization(problem, stages).search(limits)
    if realized is None:
        return in_runs
    solved, run = realized.plan(problem, "checkmate"), problem.drafter.replay.run
    forecast = run(in_runs)
    is_slower = forecast.peak_bytes <= problem.budget_bytes and forecast.step_seconds < run(solved).step_seconds
    return in_runs if is_slower else solved


class _Rematerialization:
    """Turns solutions of the program into plans."""

    def __init__(self, problem: Problem, stages: int) -> None:
        self._problem, self._gaps = problem, problem.drafter.gaps
        self._timetable = CopyTimetable(problem.drafter)
        self._plain = MemoryCurve(problem.drafter, problem.plain.live_bytes)
        self._graph = make_graph(problem.drafter, self._plain, stages)
        self._program = RecomputeProgram(self._graph)
        self._node_of = {storage: index for index, node in enumerate(self._graph.nodes) for storage in node.storages}

    def search(self, limits: SolverLimits) -> RealizedChoices | None:
        """Solve under different limits; return the plan that fits and recomputes least, or None if none fits."""
        if not self._graph.nodes:
            return None
        budget_bytes = limit_bytes = self._problem.budget_bytes
        floor, ceiling = 0, 2 * max(self._problem.plain.peak_bytes, budget_bytes)  # too low and too high a limit
        best: tuple[RealizedChoices, Solution] | None = None
        end = time.monotonic() + limits.seconds
        for _ in range(MOST_SOLUTIONS):
            left = end - time.monotonic()
            if left <= 0 or ceiling - floor <= LEAST_SLACK * budget_bytes:
                break
            solution = self._program.solve(limit_bytes, limits, left)
            if solution is None:
                floor, limit_bytes = limit_bytes, int(limit_bytes * GROWTH) + 1
            else:
                dropped, realized = self._carry_out(self._list_dropped(solution), solution)
                spare_bytes = budget_bytes - realized.load.peak_bytes
                fitting = realized if spare_bytes >= 0 else self._repair(dropped, solution)
                if fitting is not None and (best is None or self._seconds(fitting) < self._seconds(best[0])):
                    best = fitting, solution
                if 0 <= spare_bytes <= LEAST_SLACK * budget_bytes or not dropped:
                    break
                floor, ceiling = (limit_bytes, ceiling) if spare_bytes > 0 else (floor, limit_bytes)
                limit_bytes += spare_bytes
            if not floor < limit_bytes < ceiling:
                limit_bytes = (floor + ceiling) // 2
        if best is None:
            if time.monotonic() >= end:
                limits.log_gap("checkmate", float("inf"), "no solution fits, so whole runs are recomputed")
            return None
        limits.log_gap(
            "checkmate", best[1].gap, f"{len(self._graph.nodes)} groups, {len(self._graph.windows) - 1} windows"
        )
        return best[0]

    def _seconds(self, realized: RealizedChoices) -> float:
        footprints = self._problem.drafter.replay.footprints
        return sum(footprints.count_seconds(replay.segment.ops) for replay in realized.replays)

    def _list_dropped(self, solution: Solution) -> dict[Key, int]:
        """Return the gaps in which a node is not carried into some window, and the tick at which it is dropped."""
        found: dict[Key, int] = {}
        for key in self._plain.keys:
            if key[0] in self._node_of:
                gap, node = self._gaps[key], self._node_of[key[0]]
                first, last = self._graph.window_at(gap.opens) + 1, self._graph.window_at(gap.closes)
                carried = solution.carried[first : last + 1, node].tolist()
                if not all(carried):
                    kept = carried.index(False)
                    found[key] = self._last_read(node, first + kept - 1, solution) if kept else gap.opens
        return found

    def _last_read(self, node: int, window: int, solution: Solution) -> int:
        """Return the last tick in a window at which a replay may read a node that is carried into it."""
        nodes = self._graph.nodes
        reading: set[int] = set()
        for other in range(node + 1, len(nodes)):
            if not solution.carried[window, other] and (reading | {node}) & set(nodes[other].made_from):
                reading.add(other)
        first: dict[int, int] = {}  # by storage, the need at which it is absent
        for tick, storage in self._graph.needs:
            if self._graph.window_at(tick) == window and self._node_of[storage] in reading:
                first.setdefault(storage, tick)
        return max(first.values(), default=self._graph.windows[window])

    def _carry_out(
        self, dropped: Mapping[Key, int], solution: Solution, banned: frozenset[Key] = frozenset()
    ) -> tuple[dict[Key, int], RealizedChoices]:
        """Return the schedule of these drops, without gaps that no replay can fill."""

        def keeps(key: Key, tick: int) -> bool:
            node = self._node_of.get(key[0])
            if key in banned or node is None:
                return False
            window, last = self._graph.window_at(tick), self._graph.window_at(self._gaps[key].closes)
            return bool(solution.carried[window + 1 : last + 1, node].all())

        left = dict(dropped)
        while True:
            realized = realize(self._problem, self._timetable, self._plain, (), left, keeps, left)
            if isinstance(realized, RealizedChoices):
                return left, realized
            del left[realized]

    def _repair(self, dropped: dict[Key, int], solution: Solution) -> RealizedChoices | None:
        """Drop more at the peak, or keep fewer results of replays; return None if that does not suffice."""
        recomputation = Recomputation(self._problem.drafter, self._plain.nbytes)
        for key in sorted(dropped):
            recomputation.choose(key)
        banned: set[Key] = set()
        for _ in range(MOST_REPAIRS):
            done, realized = self._carry_out(dropped, solution, frozenset(banned))
            load = realized.load
            excess = load.peak_bytes - self._problem.budget_bytes
            if excess <= 0:
                return realized
            spanning = load.spanning(load.peak_tick)
            more: set[Key] = set()
            while excess > 0 and (best := recomputation.best(spanning)) is not None:
                recomputation.choose(best)
                more.add(best)
                excess -= load.nbytes[best]
            stayed = {key for replay in realized.replays if replay.tick <= load.peak_tick for key in replay.fills[1:]}
            if not more and not stayed & set(spanning) - banned:
                return None
            dropped = done | {key: self._gaps[key].opens for key in more}
            banned |= set() if more else stayed & set(spanning)
        return None


def _recompute_runs(problem: Problem) -> Plan:
    """Return the plan that recomputes as few whole runs of the forward pass as fit, or the one with the lowest peak."""
    drafter = problem.drafter
    best: tuple[int, Plan] | None = None
    drafts: Iterable[Draft] = itertools.chain(({},), draft_runs(drafter))
    for draft in drafts:
        plan = drafter.finish(draft, "checkmate", problem.budget_bytes)
        if plan is None:
            continue
        peak_bytes = drafter.replay.run(plan).peak_bytes
        if best is None or peak_bytes < best[0]:
            best = peak_bytes, plan
        if peak_bytes <= problem.budget_bytes:
            break
    assert best is not None  # the first draft drops nothing
    return best[1]
