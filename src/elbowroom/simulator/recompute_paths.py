"""Finds the ops that recompute a storage of an online step from the ops executed so far."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import Storage, Trace
from elbowroom.replays.closure import find_closure
from elbowroom.replays.footprint import Footprints
from elbowroom.replays.graph import ExecutedOps

MOST_OPS = 64
"""Ops of one path, as at run time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Path:
    """Ops that recompute one storage (`residency.context.RecomputePath`).

    Attributes:
        ops: ticks, in order.
        leaves: saved storages that they read.
        seconds: of the ops.
        nbytes: peak allocation.
        versions: (storage, version) of all storages that they read.
    """

    ops: tuple[int, ...]
    leaves: tuple[Storage, ...]
    seconds: float
    nbytes: int
    versions: tuple[tuple[int, int], ...]


class RecomputePaths:
    """Finds paths, and caches them while they are valid.

    Attributes:
        executed: the ops that have run.
        segments: segments added so far, for the machine.
    """

    def __init__(self, trace: Trace, footprints: Footprints) -> None:
        self._trace, self._footprints = trace, footprints
        self.executed = ExecutedOps(trace)
        self.segments: list[Segment] = []
        self._paths: dict[int, Path | None] = {}
        self._added: list[Path] = []

    def find(self, storage: int) -> Path | None:
        """Return the path to a storage; None if there is none."""
        path = self._paths.get(storage)
        if path is None or not self._is_open(path):
            path = self._paths[storage] = self._search(storage)
        return path

    def add_segment(self, storage: int) -> int:
        """Add a segment that recomputes a storage, and return its index."""
        path = self.find(storage)
        assert path is not None
        leaves = tuple(leaf.id for leaf in path.leaves)
        self.segments.append(Segment(ops=path.ops, outputs=(storage,), leaves=leaves))
        self._added.append(path)
        return len(self.segments) - 1

    def path_of(self, segment: int) -> Path:
        """Return the path of a segment."""
        return self._added[segment]

    def forget(self, storage: int) -> None:
        """Forget a storage that autograd no longer claims."""
        self.executed.claimed.discard(storage)
        self._paths.pop(storage, None)

    def _is_open(self, path: Path) -> bool:
        executed = self.executed
        if not all(leaf.id in executed.claimed for leaf in path.leaves):
            return False
        return all(executed.versions[storage] == version for storage, version in path.versions)

    def _search(self, storage: int) -> Path | None:
        closure = find_closure(self.executed, storage, most_ops=MOST_OPS)
        if closure is None:
            return None
        footprint = self._footprints.measure_replay(closure.ops, closure.leaves, (storage,))
        found = (self._trace.storages[leaf] for leaf in closure.leaves)
        return Path(
            ops=closure.ops,
            leaves=tuple(leaf for leaf in found if leaf.created >= 0),
            seconds=footprint.seconds,
            nbytes=footprint.peak_bytes,
            versions=tuple((leaf, self.executed.versions[leaf]) for leaf in closure.leaves),
        )
