"""Rows and columns of the fluid linear program: constraints that every plan satisfies.

At some ticks (the pivots), with bytes as shares of the plain peak and seconds as shares of the plain step:

    recomputed + offloaded            >= load - budget     absent storages free memory
    recomputed + out + again - back   >= load - budget     offloaded storages are copied out, and not yet reloading
    out <= saved, back >= needed                           copies begin after the save, and end before the need
    lane time of out, of back         <= plain + extra     between pivots; the sum of both on half-duplex links
    out, back at the end, less begun  =  all copies        copies of the model's state: this step is like the one before
    extra since the first replay      >= replays           an op is replayed as often as each of its results is dropped

Tried and left out, since no bound of ten real traces moved by more than a tenth of a percent: requiring the storages
that a replay reads to be present or recomputed as well; and splitting the time of replays, so that each serves the
lanes only while it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from elbowroom.planner.bounds.gap_arrays import GapArrays, Integers, Numbers
from elbowroom.planner.bounds.replay_counts import count_replays
from elbowroom.planner.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """A linear program: minimise `cost` over columns between 0 and `most`.

    Attributes:
        matrix: a `scipy.sparse.csr_array`.
        least: right-hand sides: the first `equal` rows equal theirs, the others are at least theirs.
        columns, rows: the first index of each group of columns and of rows.
        pivots: ticks, the end of the trace last.
        unit_bytes, unit_seconds: the bytes and seconds that are 1 in the model.
    """

    matrix: Any
    least: Numbers
    equal: int
    most: Numbers
    cost: Numbers
    columns: dict[str, int]
    rows: dict[str, int]
    pivots: Integers
    unit_bytes: float
    unit_seconds: float

    def prove(self, prices: Numbers, begin: Numbers | None = None, end: Numbers | None = None) -> float:
        """Return a lower bound on the cost from row prices (weak duality); those of a solution give the best bound.

        Args:
            prices: by row; not negative, except for the first `equal` rows.
            begin, end: lower and upper bounds of the columns; 0 and `most` by default.
        """
        reduced = self.cost - self.matrix.T @ prices
        proved = self.least @ prices + np.minimum(reduced, 0.0) @ (self.most if end is None else end)
        return float(proved if begin is None else proved + np.maximum(reduced, 0.0) @ begin)


class ModelBuilder:
    """Builds the model of one problem at given pivots.

    Args:
        recompute, offload: whether plans may do so.

    Attributes:
        gap_arrays: the gaps.
        first_replay: the tick before which nothing can be replayed.
        out_pace, back_pace: least lane time per byte of all storages, in seconds.
    """

    def __init__(
        self, problem: Problem, gap_arrays: GapArrays, *, recompute: bool = True, offload: bool = True
    ) -> None:
        replay = problem.drafter.replay
        self.gap_arrays = gap_arrays
        self._budget_bytes, self._host_bytes = problem.budget_bytes, problem.host_bytes
        self._begins = replay.begins
        self._half_duplex = replay.costs.link.half_duplex
        self._unit_bytes = float(max(1, problem.plain.peak_bytes))
        self._unit_seconds = float(replay.begins[-1]) or 1.0
        self._sizes = gap_arrays.nbytes / self._unit_bytes
        self._drops = (gap_arrays.maker >= 0) & recompute
        self._replays = count_replays(
            gap_arrays, np.flatnonzero(self._drops), np.array(replay.costs.op_seconds, dtype=float)
        )
        self.first_replay = _find_first_replay(problem, gap_arrays) if self._drops.any() else replay.trace.end
        self._moves = np.isfinite(gap_arrays.out_seconds + gap_arrays.back_seconds) & offload
        self.out_pace, self.back_pace = (
            float((seconds / gap_arrays.nbytes)[self._moves].min()) if self._moves.any() else 0.0
            for seconds in (gap_arrays.out_seconds, gap_arrays.back_seconds)
        )
        # A copy outlasts its gap only if several gaps share a claim.
        self._shared = np.union1d(np.flatnonzero(gap_arrays.before >= 0), gap_arrays.before[gap_arrays.before >= 0])
        self._alone = np.setdiff1d(np.flatnonzero(~gap_arrays.is_clean), self._shared)
        self._is_cyclic = bool(len(gap_arrays.repeats))
        self._end = replay.trace.end
        self._later = np.flatnonzero(gap_arrays.before[self._shared] >= 0)
        self._earlier = np.searchsorted(self._shared, gap_arrays.before[self._shared[self._later]])

    def build(self, pivots: Integers) -> Model:
        """Build the model at these ticks, the end of the trace last."""
        gaps, count = len(self._sizes), len(pivots)
        names = {"dropped": gaps, "moved": gaps, "copied": len(self._shared), "begun": 2 * self._is_cyclic}
        names |= {"replays": len(self._replays.count_seconds)}
        names |= dict.fromkeys(("free", "absent", "again", "saved", "needed", "out", "back"), count)
        names |= {} if self._host_bytes is None else {"ended": count}
        names |= {"extra": count}
        columns = dict(zip(names, np.cumsum([0, *names.values()]).tolist(), strict=False))
        rows = Rows(columns)
        self._add_sums(rows, pivots)
        if self._is_cyclic:
            self._add_cycle(rows, count)
        equal = rows.count
        self._add_memory(rows, pivots)
        self._add_lanes(rows, pivots)
        self._add_choices(rows)
        self._add_replays(rows, pivots)
        cost = np.zeros(sum(names.values()))
        cost[columns["extra"] :] = 1.0
        return Model(
            matrix=rows.finish(len(cost)), least=np.concatenate(rows.least), equal=equal,
            most=np.concatenate([self._find_most(name, size) for name, size in names.items()]), cost=cost,
            columns=columns, rows=rows.begins, pivots=pivots, unit_bytes=self._unit_bytes,
            unit_seconds=self._unit_seconds,
        )  # fmt: skip

    def find_copying(self, found: Numbers, model: Model) -> Numbers:
        """Return, by gap, the share that a solution copies out for that gap."""
        moved, copied = model.columns["moved"], model.columns["copied"]
        copying = np.array(found[moved : moved + len(self._sizes)])
        copying[self.gap_arrays.is_clean] = 0.0
        copying[self._shared] = found[copied : copied + len(self._shared)]
        copying[self._shared[self._later]] -= found[copied + self._earlier]
        return copying

    def _find_most(self, name: str, size: int) -> Numbers:
        """Return the upper bounds of a group of columns; every plan of interest stays below them."""
        gap_arrays, replays = self.gap_arrays, self._replays
        if name in ("dropped", "moved"):
            return np.asarray(self._drops if name == "dropped" else self._moves, dtype=float)
        if name == "copied":
            return np.ones(size)
        if name == "replays":
            return np.full(size, max(1.0, float(self._drops.sum())))
        if name == "extra":  # at most: the step waits for every move, and replays everything for each drop
            moving = (gap_arrays.out_seconds + gap_arrays.back_seconds + 2 * gap_arrays.drag_seconds)[self._moves].sum()
            replaying = (replays.drop_seconds.sum() + replays.count_seconds.sum()) * max(1, self._drops.sum())
            return np.full(size, 1.0 + float(moving + replaying) / self._unit_seconds)
        return np.full(size, 1.0 + (3 if self._is_cyclic else 1) * self._sizes.sum())

    def _add_sums(self, rows: Rows, pivots: Integers) -> None:
        """Define sums per pivot: bytes freed and absent; bytes of gaps opened, claims begun, gaps closed before it."""
        gap_arrays = self.gap_arrays
        sizes, gaps = self._sizes, np.arange(len(self._sizes))
        first = np.searchsorted(pivots, gap_arrays.piece_begin)
        after = np.searchsorted(pivots, gap_arrays.piece_end)
        for total, share in (("free", "dropped"), ("absent", "moved")):
            rows.begin_sum(total, len(pivots))
            gap = gap_arrays.piece_gap
            rows.add_within(len(pivots), first, share, gap, -sizes[gap])
            rows.add_within(len(pivots), after, share, gap, sizes[gap])
        # A release needs no copy if an earlier gap of the claim made one.
        rows.begin_sum("again", len(pivots))
        self._add_moves(rows, pivots, gaps, gap_arrays.opens, -sizes)
        self._add_copying(rows, pivots, gap_arrays.opens, sizes)
        rows.begin_sum("saved", len(pivots))
        self._add_copying(rows, pivots, gap_arrays.claim_begins, -sizes)
        rows.begin_sum("needed", len(pivots))
        self._add_moves(rows, pivots, gaps, gap_arrays.closes, -sizes)
        if self._host_bytes is not None:
            rows.begin_sum("ended", len(pivots))
            self._add_copying(rows, pivots, gap_arrays.claim_ends - 1, -sizes)

    def _add_cycle(self, rows: Rows, count: int) -> None:
        """Let the lanes carry all copies in one step, whatever of this and the next step's copies the last one made."""
        sizes, gaps = self._sizes, np.arange(len(self._sizes))
        none = np.zeros(1, dtype=np.int64)
        for index, lane in enumerate(("out", "back")):
            rows.begin(f"{lane} cycle", np.zeros(1))
            rows.add(none, lane, none + count - 1, 1.0)
            rows.add(none, "begun", none + index, -1.0)
            if lane == "out":
                self._add_shares(rows, lambda gaps, values: (0 * gaps, np.arange(len(gaps)), values), -sizes)
            else:
                rows.add(0 * gaps, "moved", gaps, -sizes)

    def _add_moves(self, rows: Rows, pivots: Integers, gaps: Integers, ticks: Integers, values: Numbers) -> None:
        """Add the moves of gaps, in the rows of the pivots after a tick of each."""
        each, shifts = self.gap_arrays.unroll(gaps, self._end)
        when = np.searchsorted(pivots, ticks[each] + shifts, side="right")
        rows.add_within(len(pivots), when, "moved", each, values[each])

    def _add_copying(self, rows: Rows, pivots: Integers, ticks: Integers, values: Numbers) -> None:
        """Add, for each gap, the share copied for it, in the rows of the pivots after a tick of each."""

        def place(gaps: Integers, values: Numbers) -> tuple[Integers, Integers, Numbers]:
            place_of = np.full(len(ticks), -1)
            place_of[gaps] = np.arange(len(gaps))
            each, shifts = self.gap_arrays.unroll(gaps, self._end)
            when = np.searchsorted(pivots, ticks[each] + shifts, side="right")
            inside = when < len(pivots)
            return when[inside], place_of[each[inside]], values[place_of[each[inside]]]

        self._add_shares(rows, place, values)

    def _add_shares(self, rows: Rows, place: Place, values: Numbers) -> None:
        """Add, for each gap, the share copied for it, where `place` says: its move, less earlier copies."""
        alone, shared = self._alone, self._shared
        later = shared[self._later]
        row, index, value = place(alone, values[alone])
        rows.add(row, "moved", alone[index], value)
        row, index, value = place(shared, values[shared])
        rows.add(row, "copied", index, value)
        row, index, value = place(later, values[later])
        rows.add(row, "copied", self._earlier[index], -value)

    def _add_memory(self, rows: Rows, pivots: Integers) -> None:
        each = np.arange(len(pivots))
        load = np.append(self.gap_arrays.live_bytes, 0.0)[pivots] - self._budget_bytes
        excess = np.maximum(load, 0.0) / self._unit_bytes
        rows.begin("cover", excess)
        rows.add(each, "free", each, 1.0)
        rows.add(each, "absent", each, 1.0)
        rows.begin("flow", excess)
        for name, sign in (("free", 1.0), ("out", 1.0), ("again", 1.0), ("back", -1.0)):
            rows.add(each, name, each, sign)
        for more, less in (("saved", "out"), ("back", "needed")):
            rows.begin(less, np.zeros(len(pivots)))
            rows.add(each, more, each, 1.0)
            rows.add(each, less, each, -1.0)
        if self._host_bytes is not None:  # host bytes: copies made, less those whose claims have ended
            rows.begin("host", np.full(len(pivots), -self._host_bytes / self._unit_bytes))
            rows.add(each, "out", each, -1.0)
            rows.add(each, "ended", each, 1.0)

    def _add_lanes(self, rows: Rows, pivots: Integers) -> None:
        plain = np.diff(self._begins[pivots], prepend=0.0) / self._unit_seconds
        each = np.arange(len(pivots))
        paces = {"out": self.out_pace, "back": self.back_pace}
        for lane in ("out",) if self._half_duplex else ("out", "back"):
            rows.begin(f"{lane} lane", -plain)
            rows.add(each, "extra", each, 1.0)
            for way in paces if self._half_duplex else (lane,):
                pace = paces[way] * self._unit_bytes / self._unit_seconds
                rows.add(each, way, each, -pace)
                rows.add(each[1:], way, each[:-1], pace)
                if self._is_cyclic:
                    rows.add(each[:1], "begun", each[:1] + list(paces).index(way), pace)

    def _add_choices(self, rows: Rows) -> None:
        """Allow one choice per gap; a copy lasts for its claim, and an offloaded share needs a copy."""
        both = np.flatnonzero(self._drops & self._moves)
        each = np.arange(len(both))
        rows.begin("choice", np.full(len(both), -1.0))
        rows.add(each, "dropped", both, -1.0)
        rows.add(each, "moved", both, -1.0)
        each = np.arange(len(self._shared))
        rows.begin("copy", np.zeros(len(each)))
        rows.add(each, "copied", each, 1.0)
        rows.add(each, "moved", self._shared, -1.0)
        each = np.arange(len(self._later))
        rows.begin("kept copy", np.zeros(len(each)))
        rows.add(each, "copied", self._later, 1.0)
        rows.add(each, "copied", self._earlier, -1.0)

    def _add_replays(self, rows: Rows, pivots: Integers) -> None:
        replays, gaps = self._replays, np.arange(len(self._sizes))
        demands, counts = np.arange(len(replays.demanded)), np.arange(len(replays.count_seconds))
        rows.begin("demand", np.zeros(len(demands)))
        rows.add(demands, "replays", replays.demanded, 1.0)
        rows.add(replays.drop_demand, "dropped", replays.drop_gap, -1.0)
        rows.add(replays.count_demand, "replays", replays.count_asking, -1.0)
        drag = self.gap_arrays.drag_seconds / self._unit_seconds
        for name, when in (("late", pivots > self.first_replay), ("total", pivots >= 0))[: 2 if drag.any() else 1]:
            late = np.flatnonzero(when)
            rows.begin(name, np.zeros(1))
            rows.add(0 * late, "extra", late, 1.0)
            rows.add(0 * gaps, "dropped", gaps, -replays.drop_seconds / self._unit_seconds)
            rows.add(0 * counts, "replays", counts, -replays.count_seconds / self._unit_seconds)
        if drag.any():  # in the row "total", the last one
            rows.add(0 * gaps, "moved", gaps, -drag)
            self._add_shares(rows, lambda gaps, values: (0 * gaps, np.arange(len(gaps)), values), -drag)


Place = Callable[[Integers, Numbers], tuple[Integers, Integers, Numbers]]
"""Takes gaps and their values; returns rows, places among these gaps, and values."""


class Rows:
    """Builds a sparse matrix group by group."""

    def __init__(self, columns: dict[str, int]) -> None:
        self._columns = columns
        self._row: list[Integers] = []
        self._column: list[Integers] = []
        self._value: list[Numbers] = []
        self.least: list[Numbers] = []
        self.begins: dict[str, int] = {}
        self.count = 0
        self._group = 0

    def begin(self, name: str, least: Numbers) -> None:
        """Begin a group of rows with these right-hand sides."""
        self.begins[name], self._group = self.count, self.count
        self.count += len(least)
        self.least.append(least)

    def begin_sum(self, name: str, count: int) -> None:
        """Begin rows of a running sum: a column less the previous one equals the entries added with a minus sign."""
        each = np.arange(count)
        self.begin(f"{name} sum", np.zeros(count))
        self.add(each, name, each, 1.0)
        self.add(each[1:], name, each[:-1], -1.0)

    def add(self, rows: npt.ArrayLike, name: str, columns: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Add entries to the current group, in a named group of columns."""
        at = np.asarray(rows, dtype=np.int64)
        self._row.append(at + self._group)
        self._column.append(np.asarray(columns, dtype=np.int64) + self._columns[name])
        self._value.append(np.broadcast_to(np.asarray(values, dtype=float), at.shape))

    def add_within(self, count: int, rows: Integers, name: str, columns: Integers, values: Numbers) -> None:
        """Add entries of the first `count` rows; ignore later rows."""
        inside = rows < count
        self.add(rows[inside], name, columns[inside], values[inside])

    def finish(self, width: int) -> Any:
        """Return the matrix; duplicate entries are summed."""
        from scipy.sparse import csr_array

        parts = np.concatenate(self._row), np.concatenate(self._column)
        matrix = csr_array((np.concatenate(self._value), parts), shape=(self.count, width))
        matrix.sum_duplicates()
        matrix.eliminate_zeros()
        return matrix


def _find_first_replay(problem: Problem, gap_arrays: GapArrays) -> int:
    """Return the first tick at which anything may be replayed; the end of the trace if nothing may."""
    end = problem.drafter.replay.trace.end
    maker, can_replay = gap_arrays.forced.maker, gap_arrays.forced.can_replay
    closes = (
        gap.closes
        for (storage, _), gap in problem.drafter.gaps.items()
        if maker[storage] >= 0 and can_replay[maker[storage]]
    )
    return min(closes, default=end)
