"""Branch and bound over the choices of a small step: the fastest of all.

    all choices ----- gap a stays ------ ...                bound 1.21 s: not below the best so far, pruned
                 |--- gap a is offloaded --- gap b ... ---- few vectors are left: sweep them all
                 '--- gap a is dropped ---- ...             no plan fits: pruned

The fluid linear program with the choices so far fixed bounds a branch; the compiled simulator times vectors.

Source: A. H. Land, A. G. Doig, "An automatic method of solving discrete programming problems", Econometrica 28, 1960.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

import numpy as np

from elbowroom._numba_loops import compiled
from elbowroom.planner.bounds.fluid import find_fluid, list_prices, solve_fluid
from elbowroom.planner.bounds.fluid_model import Model, ModelBuilder
from elbowroom.planner.bounds.gap_arrays import Numbers, make_gap_arrays
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.segments import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN
from elbowroom.simulator.compiled_loops.sweep import sweep
from elbowroom.simulator.compiled_loops.transit import Sweep

FEW_VECTORS = 1 << 8
"""A branch with at most this many vectors is swept rather than bounded."""

SLACKS = (0.0, 0.5, 2.0)

CLOSE = 1e-6
"""Share of the best time so far: a branch that cannot gain more is pruned."""

KEPT, MOVED, DROPPED = range(3)
KINDS = ((KEEP,), (OFFLOAD,), (RECOMPUTE, RECOMPUTE_OWN), (RECOMPUTE,), (RECOMPUTE_OWN,))
"""Choices that a kind leaves open to a gap. The linear program does not distinguish the last three."""


Branch = dict[int, int]
"""By gap, the only one of `KINDS` that is left to it; a gap that is absent has all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BranchAndBoundResult:
    """Result of a search.

    Attributes:
        choices, slack: of the fastest plan; `choices` is None if none fits and beats the limit.
        seconds: its time; the limit if there is none.
        bound_seconds: no choice vector is faster. Equals `seconds`, except for `CLOSE`, if the search was exhaustive.
        nodes: number of branches visited.
    """

    choices: Array | None
    slack: float
    seconds: float
    bound_seconds: float
    nodes: int


class BranchAndBound:
    """Searches the choices of one problem.

    Args:
        limit: seconds; only faster plans count.

    Attributes:
        vectors: builds plans from choice vectors.
        gaps: the gaps to decide on, the largest first: those whose absence frees bytes at a tick where the plain step
            exceeds the budget.
    """

    def __init__(self, problem: Problem, limit: float = math.inf) -> None:
        self._problem = problem
        self.vectors = ChoiceVectorPlanner(problem)
        gap_arrays = make_gap_arrays(problem)
        self._place = {key: index for index, key in enumerate(gap_arrays.keys)}
        where = [(self._place[key], gap) for gap, key in enumerate(self.vectors.keys) if key in self._place]
        self.gaps = [gap for index, gap in sorted(where, key=lambda pair: (-gap_arrays.nbytes[pair[0]], pair[1]))]
        self._can_drop = {gap: gap_arrays.maker[index] >= 0 for index, gap in where}
        self._builder = ModelBuilder(problem, gap_arrays)
        self._host_bytes = 1 << 62 if problem.host_bytes is None else problem.host_bytes
        self._best = np.zeros(len(self.vectors.keys), dtype=np.int8)
        self._limit = self._seconds = limit
        self._slack = 0.0

    def search(self, most_nodes: int) -> BranchAndBoundResult:
        """Dive to the few vectors of the most promising branch, then go on from the branch with the least bound.

        Cost: at worst exponential in the gaps; a linear program or some thousand sweeps a node.
        """
        self._sweep(self._list_choices(dict.fromkeys(self.gaps, MOVED)))
        first = solve_fluid(self._problem)
        if first is None:
            return self._report(self._seconds, 0)
        model = self._builder.build(first.pivots)
        queue = _Queue()
        queue.put([(first.seconds, {})])
        nodes = 0
        while nodes < most_nodes:
            branch = queue.take(self._seconds * (1 - CLOSE))
            if branch is None:
                break
            nodes += 1
            lists = self._list_choices(branch)
            if math.prod(map(len, lists)) <= FEW_VECTORS:
                self._sweep(lists)
                continue
            found = self._bound(model, branch)
            if found is not None and found[0] < self._seconds * (1 - CLOSE):
                queue.put(self._branch(branch, *found))
        return self._report(min(self._seconds, queue.least), nodes)

    def _report(self, bound_seconds: float, nodes: int) -> BranchAndBoundResult:
        return BranchAndBoundResult(
            choices=self._best.copy() if self._seconds < self._limit else None, slack=self._slack,
            seconds=self._seconds, bound_seconds=bound_seconds, nodes=nodes,
        )  # fmt: skip

    def _list_choices(self, fixed: Branch) -> list[list[int]]:
        """Return the choices that each gap still has."""
        lists: list[list[int]] = [[KEEP]] * len(self._best)
        for gap in self.gaps:
            kinds = (fixed[gap],) if gap in fixed else self._list_kinds(gap)
            lists[gap] = [choice for kind in kinds for choice in KINDS[kind]]
        return lists

    def _list_kinds(self, gap: int) -> tuple[int, ...]:
        return (KEPT, MOVED, DROPPED) if self._can_drop[gap] else (KEPT, MOVED)

    def _sweep(self, lists: list[list[int]]) -> None:
        counts = np.array([len(choices) for choices in lists], dtype=np.int64)
        table = np.zeros((len(lists), max(map(len, lists), default=1)), dtype=np.int8)
        for gap, choices in enumerate(lists):
            table[gap, : len(choices)] = choices
        for slack in SLACKS:
            seconds = try_vectors(
                self.vectors.columns, table, counts, self._problem.budget_bytes, self._host_bytes, slack,
                self._seconds, self._best, self.vectors.room,
            )  # fmt: skip
            if seconds < self._seconds:
                self._seconds, self._slack = float(seconds), slack

    def _bound(self, model: Model, fixed: Branch) -> tuple[float, Numbers, Numbers] | None:
        """Return seconds, and the shares of each gap dropped and moved; None if nothing fits."""
        least, most = np.zeros(len(model.most)), model.most.copy()
        for gap, kind in fixed.items():
            index = self._place[self.vectors.keys[gap]]
            for name, is_so in (("moved", kind == MOVED), ("dropped", kind >= DROPPED)):
                column = model.columns[name] + index
                most[column], least[column] = min(most[column], float(is_so)), float(is_so)
                if least[column] > most[column]:
                    return None
        solved: Any = find_fluid(model, least, most)
        if solved is None:
            return 0.0, np.zeros(len(self._place)), np.zeros(len(self._place))
        if solved.status == 2:
            return None
        extra = model.prove(list_prices(solved), least, most)
        dropped, moved = (solved.x[model.columns[name] :][: len(self._place)] for name in ("dropped", "moved"))
        return self._problem.plain.step_seconds + max(0.0, extra) * model.unit_seconds, dropped, moved

    def _branch(self, fixed: Branch, seconds: float, dropped: Numbers, moved: Numbers) -> list[tuple[float, Branch]]:
        """Return the branches at one gap, the most promising last: the gap of which the relaxation is least certain.

        Ties go to the largest gap.
        """
        left = [gap for gap in self.gaps if gap not in fixed]
        if not left:
            gap = next(gap for gap in self.gaps if fixed[gap] == DROPPED)
            return [(seconds, {**fixed, gap: kind}) for kind in (DROPPED + 2, DROPPED + 1)]
        index = np.array([self._place[self.vectors.keys[gap]] for gap in left])
        shares = np.stack((1 - dropped[index] - moved[index], moved[index], dropped[index]))
        chosen = int(np.argmin(np.round(shares.max(axis=0), 3)))
        gap = left[chosen]
        order = sorted(self._list_kinds(gap), key=lambda kind: (round(float(shares[kind, chosen]), 6), -kind))
        return [(seconds, {**fixed, gap: kind}) for kind in order]


class _Queue:
    """Branches not visited yet, with their bounds in seconds."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Branch]] = []
        self._next: tuple[float, Branch] | None = None
        self._count = 0

    @property
    def least(self) -> float:
        """The least bound of all; infinite if there is no branch."""
        return min(self._heap[0][0] if self._heap else math.inf, self._next[0] if self._next else math.inf)

    def put(self, branches: list[tuple[float, Branch]]) -> None:
        """Add branches; the last one is visited next."""
        *others, self._next = branches
        for seconds, branch in others:
            self._count += 1
            heapq.heappush(self._heap, (seconds, -len(branch), self._count, branch))

    def take(self, limit: float) -> Branch | None:
        """Remove and return the next branch; None if no bound is below the limit."""
        if self._next is not None:
            seconds, branch = self._next
            self._next = None
            if seconds < limit:
                return branch
        if not self._heap or self._heap[0][0] >= limit:
            self._heap.clear()
            return None
        return heapq.heappop(self._heap)[3]


@compiled
def try_vectors(
    columns: Columns, table: Array, counts: Array, budget_bytes: int, host_bytes: int, slack: float, limit: float,
    best: Array, room: Sweep,
) -> float:  # fmt: skip
    """Sweep every vector made of the first `counts` choices of each row of a table; set `best` to the fastest.

    Args:
        limit: seconds; only faster vectors count.

    Returns:
        The seconds of the fastest vector that fits; `limit` if there is none.

    Cost: a sweep for each vector.
    """
    place = np.zeros(len(counts), dtype=np.int64)
    choices = table[:, 0].copy()
    while True:
        if sweep(columns, choices, budget_bytes, slack, limit, room):
            outcome = room.outcome[0]
            fits = outcome.peak_bytes <= budget_bytes and outcome.lower_bytes <= host_bytes
            if fits and outcome.seconds < limit:
                limit = outcome.seconds
                best[:] = choices
        gap = 0
        while gap < len(counts):
            place[gap] = (place[gap] + 1) % counts[gap]
            choices[gap] = table[gap, place[gap]]
            if place[gap] != 0:
                break
            gap += 1
        if gap == len(counts):
            return limit
