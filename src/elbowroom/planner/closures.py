"""Which ops must be replayed to have a storage again, and what they read.

Going back from the storage through the ops that wrote it: a read that is there is a leaf; any other must be replayed
too. Parameters, buffers and inputs are there as long as the program holds them; anything else only while autograd
claims it (so that it cannot change unnoticed) and the plan does not drop it. Every op must be one that may be replayed,
and every leaf must still have the version that was read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from elbowroom.ir.trace import PERSISTENT_ROLES, Op, Trace


@dataclasses.dataclass(frozen=True, slots=True)
class Closure:
    """What one replay takes.

    Attributes:
        ops: ticks, in order.
        leaves: storages that are read but not made, sorted.
        made: storages whose final contents are made.
    """

    ops: tuple[int, ...]
    leaves: tuple[int, ...]
    made: frozenset[int]


class Closures:
    """Finds closures in one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._writers = [[trace.ops[write.op] for write in writes] for writes in trace.writes]
        self._claims = trace.claims

    def claim_at(self, storage: int, tick: int) -> int:
        """The tick of the save that began the claim on a storage at `tick`; -1 if there is none there."""
        return next((begin for begin, end in self._claims.get(storage, ()) if begin < tick < end), -1)

    def find(self, target: int, tick: int, is_dropped: Callable[[int], bool]) -> Closure | None:
        """How to make `target` at `tick`, when the storages for which `is_dropped` holds are not there.

        Returns:
            None if it cannot be replayed.

        Cost: linear in the ops replayed.
        """
        ops: dict[int, Op] = {}
        leaves: set[int] = set()
        written_until: dict[int, int] = {}
        pending: list[tuple[int, int]] = [(target, tick)]
        while pending:
            storage, limit = pending.pop()
            if written_until.get(storage, -1) >= limit:
                continue
            written_until[storage] = limit
            if self._trace.storages[storage].created < 0:
                return None
            for op in self._writers[storage]:
                if op.tick >= limit:
                    break
                if op.tick in ops:
                    continue
                if op.barrier:
                    return None
                ops[op.tick] = op
                for view in op.reads:
                    if self._is_there(view.storage, view.version, tick, is_dropped):
                        leaves.add(view.storage)
                    else:
                        pending.append((view.storage, op.tick))
        # A storage that is made here cannot at the same time be read from outside.
        if any(view.storage in leaves for op in ops.values() for view in op.writes):
            return None
        made = frozenset(storage for storage, limit in written_until.items() if self._writers[storage][-1].tick < limit)
        return Closure(ops=tuple(sorted(ops)), leaves=tuple(sorted(leaves)), made=made)

    def _is_there(self, storage: int, version: int, tick: int, is_dropped: Callable[[int], bool]) -> bool:
        home = self._trace.storages[storage]
        if home.role in PERSISTENT_ROLES:
            if not home.created < tick < home.released:
                return False
        else:
            if is_dropped(storage) or self.claim_at(storage, tick) < 0:
                return False
        # Its contents must be those that were read: no write may lie between the read and the replay.
        writes = [op.tick for op in self._writers[storage] if op.tick < tick]
        changed = len(writes) - (1 if home.created >= 0 else 0)
        return changed == version
