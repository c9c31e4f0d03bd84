"""The ops of a step as a graph: which ops write a storage, and from which storages a replay may start.

OpGraph       protocol that `closure.find_closure` uses
TraceGraph    graph of a planned step at any tick, given the storages dropped by then
ExecutedOps   graph of a running step now; `native/recorded_ops.cpp` is its counterpart for real tensors
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol

from elbowroom.ir.trace import PERSISTENT_ROLES, Op, Role, Trace, View


class OpGraph(Protocol):
    """Ops and storages of a step at the time of a replay."""

    @property
    def now(self) -> int:
        """Tick of the replay."""
        ...

    def list_writers(self, storage: int, before: int) -> Sequence[Op]:
        """Return the ops that wrote a storage before a tick, in order; empty if no op made it."""
        ...

    def is_final(self, storage: int, before: int) -> bool:
        """Return True if `list_writers` returns all ops that write the storage."""
        ...

    def is_available(self, view: View) -> bool:
        """Return True if a replay may read this version of a storage without recomputing it."""
        ...


class TraceGraph:
    """The graph of a whole trace, at any tick."""

    def __init__(self, trace: Trace) -> None:
        self.storages = trace.storages
        self.has_contents = trace.has_contents
        self.writers: list[list[Op]] = [[] for _ in trace.storages]
        for op in trace.ops:
            for view in op.writes:
                self.writers[view.storage].append(op)
        self.write_ticks = [[op.tick for op in writers] for writers in self.writers]
        self._claims = trace.claims

    def claim_at(self, storage: int, tick: int) -> int:
        """Return the tick of the save that began the claim on a storage at `tick`; -1 if there is no claim then."""
        return next((begin for begin, end in self._claims.get(storage, ()) if begin < tick < end), -1)

    def at(self, tick: int, is_dropped: Callable[[int], bool]) -> _PlannedMoment:
        """Return the graph for a replay at `tick`, with the storages for which `is_dropped` holds unavailable."""
        return _PlannedMoment(self, tick, is_dropped)


class _PlannedMoment:
    """Graph of a trace at one tick.

    Parameters, buffers and inputs are available while the program holds them. Anything else is available only while
    autograd claims it, so that a change is noticed. What comes and goes without an op must be there, too.
    """

    __slots__ = ("_graph", "_is_dropped", "now")

    def __init__(self, graph: TraceGraph, tick: int, is_dropped: Callable[[int], bool]) -> None:
        self._graph = graph
        self._is_dropped = is_dropped
        self.now = tick

    def list_writers(self, storage: int, before: int) -> Sequence[Op]:
        graph = self._graph
        if graph.storages[storage].created < 0:
            return ()
        return graph.writers[storage][: bisect.bisect_left(graph.write_ticks[storage], before)]

    def is_final(self, storage: int, before: int) -> bool:
        return self._graph.write_ticks[storage][-1] < before

    def is_available(self, view: View) -> bool:
        graph, storage = self._graph, view.storage
        home = graph.storages[storage]
        if not graph.has_contents(storage, self.now):
            return False
        if home.role in PERSISTENT_ROLES:
            if not home.created < self.now < home.released:
                return False
        elif self._is_dropped(storage) or graph.claim_at(storage, self.now) < 0:
            return False
        writes = bisect.bisect_left(graph.write_ticks[storage], self.now)
        return writes - (home.created >= 0) == view.version


class ExecutedOps:
    """Graph of the ops of a step that have run so far.

    Leaves may be storages that autograd saved, in any tier, and storages that the program holds, except for inputs: a
    data loader may overwrite them with the next batch.

    Attributes:
        versions: number of writes to each storage so far, creation excluded.
        claimed: storages that autograd has saved and may still unpack.
    """

    def __init__(self, trace: Trace) -> None:
        self._storages = trace.storages
        self._writers: list[list[Op]] = [[] for _ in trace.storages]
        self.versions = [0] * len(trace.storages)
        self.claimed: set[int] = set()
        self.now = 0

    def add(self, op: Op) -> None:
        """Add an op that has run."""
        self.now = op.tick + 1
        for storage in {view.storage for view in op.writes}:
            if self._storages[storage].created != op.tick:
                self.versions[storage] += 1
            if self._storages[storage].created >= 0:
                self._writers[storage].append(op)

    def list_writers(self, storage: int, before: int) -> Sequence[Op]:
        return self._writers[storage]

    def is_final(self, storage: int, before: int) -> bool:
        return True

    def is_available(self, view: View) -> bool:
        storage = view.storage
        if self.versions[storage] != view.version:
            return False
        home = self._storages[storage]
        return storage in self.claimed if home.created >= 0 else home.role is not Role.INPUT
