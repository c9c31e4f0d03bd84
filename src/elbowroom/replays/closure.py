"""Finds the ops to replay in order to recompute a storage, and the storages that they read.

The search goes backwards through the ops that wrote the storage. A storage that they read is a leaf if it is available;
otherwise it is recomputed, too. There is no closure if the search meets an op with a barrier, or an unavailable storage
that no op made.
"""

from __future__ import annotations

import dataclasses

from elbowroom.ir.trace import Op
from elbowroom.replays.graph import OpGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Closure:
    """Ops and storages of one replay.

    Attributes:
        ops: ticks, in order.
        leaves: storages that are read but not made, sorted.
        made: storages whose final contents the replay makes.
    """

    ops: tuple[int, ...]
    leaves: tuple[int, ...]
    made: frozenset[int]


def find_closure(graph: OpGraph, target: int, *, most_ops: int | None = None) -> Closure | None:
    """Find the closure of `target`.

    Args:
        most_ops: limit on the number of ops.

    Returns:
        None if `target` cannot be recomputed within the limit.

    Cost: linear in the ops replayed.
    """
    ops: dict[int, Op] = {}
    leaves: set[int] = set()
    made_until: dict[int, int] = {}
    pending = [(target, graph.now)]
    while pending:
        storage, limit = pending.pop()
        if made_until.get(storage, -1) >= limit:
            continue
        made_until[storage] = limit
        writers = graph.list_writers(storage, limit)
        if not writers:
            return None
        for op in writers:
            if op.tick in ops:
                continue
            if op.barrier or len(ops) == most_ops:
                return None
            ops[op.tick] = op
            for view in op.reads:
                if graph.is_available(view):
                    leaves.add(view.storage)
                else:
                    pending.append((view.storage, op.tick))
    made = frozenset(storage for storage, limit in made_until.items() if graph.is_final(storage, limit))
    leaves -= made
    # A storage that the replay only partly rewrites cannot be a leaf, too.
    if any(view.storage in leaves for op in ops.values() for view in op.writes):
        return None
    return Closure(ops=tuple(sorted(ops)), leaves=tuple(sorted(leaves)), made=made)
