"""The way back to a storage, from what the step has done so far: the twin of `runtime.history` over a trace."""

from __future__ import annotations

from typing import NamedTuple

from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Role, Trace

MOST_RUNS = 64
"""Ops on a way, as at run time."""


class Way(NamedTuple):
    """How a storage is computed again.

    Attributes:
        ops: indices, in order.
        leaves: saved storages that it starts from.
        seconds: of the ops.
        nbytes: most that a replay allocates at once.
        versions: (storage, version) of all that it starts from.
    """

    ops: tuple[int, ...]
    leaves: tuple[int, ...]
    seconds: float
    nbytes: int
    versions: tuple[tuple[int, int], ...]


class Backtrack:
    """What has run so far.

    Attributes:
        versions: writes to each storage so far, beyond the one that made it.
        claimed: storages that autograd has a claim on.
    """

    def __init__(self, trace: Trace, costs: Costs, rounded: list[int]) -> None:
        self._trace, self._costs, self._rounded = trace, costs, rounded
        self._runs: list[list[int] | None] = [[] for _ in trace.storages]
        self.versions = [0] * len(trace.storages)
        self.claimed: set[int] = set()

    def run(self, index: int) -> None:
        """An op has run."""
        op = self._trace.ops[index]
        for storage in dict.fromkeys(view.storage for view in op.writes):
            runs = self._runs[storage]
            is_made = self._trace.storages[storage].created == op.tick
            if not is_made:
                self.versions[storage] += 1
            if op.barrier:
                self._runs[storage] = None
            elif runs is not None and (is_made or runs):
                runs.append(index)

    def is_open(self, way: Way) -> bool:
        """Whether a way that was found can still be gone."""
        is_claimed = all(leaf in self.claimed for leaf in way.leaves)
        return is_claimed and all(self.versions[storage] == version for storage, version in way.versions)

    def find(self, target: int) -> Way | None:
        """The way to a storage; None if there is none."""
        trace = self._trace
        taken: set[int] = set()
        starts: dict[int, int] = {}
        leaves: list[int] = []
        stack, seen = [target], {target}
        while stack:
            runs = self._runs[stack.pop()]
            if not runs:
                return None
            for index in runs:
                if index in taken:
                    continue
                if len(taken) == MOST_RUNS:
                    return None
                taken.add(index)
                for view in trace.ops[index].reads:
                    storage = view.storage
                    is_same = self.versions[storage] == view.version
                    if trace.storages[storage].created < 0:
                        if not is_same or trace.storages[storage].role is Role.INPUT:
                            return None  # whoever loads a batch may write the next one to the same place
                        starts[storage] = view.version
                    elif storage not in seen and is_same and storage in self.claimed:
                        if storage not in starts:
                            leaves.append(storage)
                        starts[storage] = view.version
                    elif storage not in seen:
                        seen.add(storage)
                        stack.append(storage)
        ops = tuple(sorted(taken))
        return Way(
            ops=ops,
            leaves=tuple(leaves),
            seconds=sum(self._costs.op_seconds[index] for index in ops),
            nbytes=self._count_bytes(ops, target),
            versions=tuple(starts.items()),
        )

    def _count_bytes(self, ops: tuple[int, ...], target: int) -> int:
        trace = self._trace
        last: dict[int, int] = {target: len(ops)}
        for place, index in enumerate(ops):
            for view in (*trace.ops[index].reads, *trace.ops[index].writes):
                last[view.storage] = max(place, last.get(view.storage, 0))
        live: dict[int, int] = {}
        most = 0
        for place, index in enumerate(ops):
            for view in trace.ops[index].writes:
                live[view.storage] = self._rounded[view.storage]
            most = max(most, sum(live.values()) + self._costs.workspace_bytes[index])
            for storage in [each for each in live if last[each] == place]:
                del live[storage]
        return most
