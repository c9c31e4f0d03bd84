"""Checkmate's integer program over a small graph: which nodes are carried into each window and recomputed in it.

    S[w, i]        node i is carried into window w                 S[w+1, i] <= S[w, i] + R[w, i]
    R[w, i]        node i is recomputed in window w                R[w, i]   <= R[w, j] + S[w, j], i made from j
    FREE[w, i, k]  it is freed once k has been recomputed          at most R[w, k], 1 - S[w+1, i], and 1 - R[w, l] for
                                                                   every l after k that is made from i
    U[w, k]        bytes once k has been recomputed                U[w, k] = U[w, k-1] + R[w, k] - FREE[w, ., k-1];
                                                                   plus the transients of k, at most the limit
    needed nodes   S[w, i] + R[w, i] = 1
    other nodes    S[w, i] + R[w, i] <= 1                          R[w, i] <= sum of R[w, k] over k made from i

    minimise the seconds of all R

Source: P. Jain, A. Jain, A. Nrusimha, A. Gholami, P. Abbeel, K. Keutzer, I. Stoica, J. E. Gonzalez, "Checkmate:
Breaking the memory wall with optimal tensor rematerialization", MLSys 2020: the program with frontier-advancing stages,
and its two-phase rounding (carried nodes are rounded at one half, recomputed ones follow from them). The program
published for open solvers lacks FREE <= R: without it, a value may be freed at a node that is not recomputed, so memory
is undercounted. Ours: a stage is a window of the backward pass, in which nodes are recomputed for needs alone, since
nothing can be replayed at other times; and the memory of everything that is not a node changes from window to window.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from elbowroom.planner.ilp.recompute_graph import RecomputeGraph
from elbowroom.planner.ilp.solver_limits import SolverLimits

_INFEASIBLE = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The nodes carried from window to window.

    Attributes:
        carried: by window and node, whether it is present when the window begins.
        gap: relative gap: at most this share of the recomputed seconds could be saved; infinite if no bound is known.
        rounded: whether it was rounded from the relaxation, so it may exceed the limit.
    """

    carried: npt.NDArray[np.bool_]
    gap: float
    rounded: bool


class RecomputeProgram:
    """The program for one graph, without its limit."""

    def __init__(self, graph: RecomputeGraph) -> None:
        self._graph = graph
        windows, nodes = range(1, len(graph.windows)), range(len(graph.nodes))
        self._count = 0
        ancestors = self._find_ancestors()
        self._s = {(w, i): self._add() for w in windows for i in nodes if w <= graph.last_needed[i]}
        self._r = {(w, i): self._add() for w in windows for i in sorted(ancestors[w])}
        self._binaries = self._count
        self._free = {
            (w, i, k): self._add()
            for w, k in self._r
            for i in graph.nodes[k].made_from
            if i not in graph.needed[w]  # otherwise it is kept
        }
        self._u = {(w, k): self._add() for w, k in self._r}
        self._users: list[list[int]] = [[] for _ in nodes]
        for k, node in enumerate(graph.nodes):
            for i in node.made_from:
                self._users[i].append(k)
        self._scale = max((node.nbytes for node in graph.nodes), default=1) or 1

    def _add(self) -> int:
        self._count += 1
        return self._count - 1

    def _find_ancestors(self) -> list[set[int]]:
        """Return, by window, the nodes needed in it and all nodes that these are made from."""
        found: list[set[int]] = []
        for needed in self._graph.needed:
            closed: set[int] = set()
            pending = list(needed)
            while pending:
                node = pending.pop()
                if node not in closed:
                    closed.add(node)
                    pending += self._graph.nodes[node].made_from
            found.append(closed)
        return found

    def solve(self, limit_bytes: int, limits: SolverLimits, seconds: float) -> Solution | None:
        """Solve the program under a limit in bytes.

        Args:
            seconds: time left.

        Returns:
            The best solution found within the limits; if there is none, the rounded relaxation; None if the program or
            its relaxation has no solution.

        Cost: exponential in the nodes times the windows; hence the limits.
        """
        from scipy.optimize import milp

        rows = self._write_rows(limit_bytes)
        integrality = np.zeros(self._count)
        integrality[: self._binaries] = 1
        options = limits.options(seconds)
        found = milp(
            self._objective(),
            integrality=integrality,
            bounds=self._bounds(),
            constraints=rows,
            options=options,
        )
        if found.x is not None:
            return Solution(carried=self._read(found.x), gap=float(found.mip_gap), rounded=False)
        if found.status == _INFEASIBLE:
            return None
        relaxed = milp(self._objective(), bounds=self._bounds(), constraints=rows, options=options)
        return None if relaxed.x is None else Solution(carried=self._read(relaxed.x), gap=float("inf"), rounded=True)

    def _objective(self) -> npt.NDArray[np.float64]:
        objective = np.zeros(self._count)
        for (_, i), variable in self._r.items():
            objective[variable] = self._graph.nodes[i].seconds
        return objective / (objective.sum() or 1.0)

    def _bounds(self) -> object:
        from scipy.optimize import Bounds

        upper = np.ones(self._count)
        upper[list(self._u.values())] = np.inf  # limited by rows
        return Bounds(np.zeros(self._count), upper)

    def _read(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        carried = np.zeros((len(self._graph.windows), len(self._graph.nodes)), dtype=np.bool_)
        for place, variable in self._s.items():
            carried[place] = values[variable] > 0.5
        return carried

    # -- rows -----------------------------------------------------------------------------------------------------

    def _write_rows(self, limit_bytes: int) -> object:
        rows = _Rows(self._count)
        self._write_flow(rows)
        self._write_freeing(rows)
        for w in range(1, len(self._graph.windows)):
            self._write_recomputation(rows, w, limit_bytes)
        self._write_limits(rows, limit_bytes)
        return rows.finish()

    def _write_flow(self, rows: _Rows) -> None:
        graph = self._graph
        for (w, i), variable in self._s.items():
            if w > 1:
                before = {self._s[w - 1, i]: -1.0} | ({self._r[w - 1, i]: -1.0} if (w - 1, i) in self._r else {})
                rows.add({variable: 1.0} | before, most=0.0)
        for (w, i), variable in self._r.items():
            if (w, i) in self._s:
                # A present node is not recomputed; a needed node is present or recomputed.
                least = 1.0 if i in graph.needed[w] else 0.0
                rows.add({variable: 1.0, self._s[w, i]: 1.0}, least=least, most=1.0)
            if i not in graph.needed[w]:
                users = (k for k in self._users[i] if (w, k) in self._r)
                rows.add({variable: 1.0} | {self._r[w, k]: -1.0 for k in users}, most=0.0)
            for j in graph.nodes[i].made_from:
                present = {self._r[w, j]: -1.0} | ({self._s[w, j]: -1.0} if (w, j) in self._s else {})
                rows.add({variable: 1.0} | present, most=0.0)

    def _write_freeing(self, rows: _Rows) -> None:
        for (w, i, k), variable in self._free.items():
            rows.add({variable: 1.0, self._r[w, k]: -1.0}, most=0.0)
            if (w + 1, i) in self._s:
                rows.add({variable: 1.0, self._s[w + 1, i]: 1.0}, most=1.0)
            for other in self._users[i]:
                if other > k and (w, other) in self._r:
                    rows.add({variable: 1.0, self._r[w, other]: 1.0}, most=1.0)

    def _size(self, w: int, i: int) -> float:
        graph = self._graph
        nbytes = graph.node_bytes[w][0, i] if w <= graph.last_needed[i] else graph.nodes[i].nbytes
        return float(nbytes) / self._scale

    def _write_recomputation(self, rows: _Rows, w: int, limit_bytes: int) -> None:
        graph = self._graph
        before = {self._s[w, i]: -self._size(w, i) for i in range(len(graph.nodes)) if (w, i) in self._s}
        constant = float(graph.fixed_bytes[w][0]) / self._scale
        for k in [k for window, k in self._r if window == w]:
            here = {self._u[w, k]: 1.0, self._r[w, k]: -self._size(w, k)}
            rows.add(here | before, least=constant, most=constant)
            extra = graph.nodes[k].extra_bytes / self._scale
            rows.add({self._u[w, k]: 1.0, self._r[w, k]: extra}, most=limit_bytes / self._scale)
            freed = {self._free[w, i, k]: self._size(w, i) for i in graph.nodes[k].made_from if (w, i, k) in self._free}
            before, constant = {self._u[w, k]: -1.0} | freed, 0.0

    def _write_limits(self, rows: _Rows, limit_bytes: int) -> None:
        graph = self._graph
        for w, fixed in enumerate(graph.fixed_bytes):
            needed = sorted(graph.needed[w])
            others = [i for i in range(len(graph.nodes)) if i not in graph.needed[w] and (w + 1, i) in self._s]
            for fixed_bytes, sizes in zip(fixed, graph.node_bytes[w], strict=True):
                room = (limit_bytes - int(fixed_bytes) - int(sizes[needed].sum())) / self._scale
                rows.add({self._s[w + 1, i]: float(sizes[i]) / self._scale for i in others}, most=room)


class _Rows:
    """Linear constraints, added row by row."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._entries: list[tuple[int, int, float]] = []
        self._least: list[float] = []
        self._most: list[float] = []

    def add(self, terms: dict[int, float], *, least: float = -np.inf, most: float = np.inf) -> None:
        """Add one row: `least` <= the terms <= `most`."""
        self._entries += [(len(self._least), column, factor) for column, factor in terms.items() if factor]
        self._least.append(least)
        self._most.append(most)

    def finish(self) -> object:
        """Return all rows as scipy's `LinearConstraint`."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        rows, columns, factors = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        shape = (len(self._least), self._columns)
        return LinearConstraint(csr_array((factors, (rows, columns)), shape=shape), self._least, self._most)
