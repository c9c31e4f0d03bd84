"""Which ops must be replayed to have a storage again, and what they read.

Going back from the storage through the ops that wrote it: a read that is available is a leaf; any other must be made
too. A closure is found or there is none: an op with a barrier, or something that no op made, ends the search.
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
        made: storages whose final contents are made.
    """

    ops: tuple[int, ...]
    leaves: tuple[int, ...]
    made: frozenset[int]


def find_closure(graph: OpGraph, target: int, *, most_ops: int | None = None) -> Closure | None:
    """Find what it takes to make `target` again.

    Args:
        most_ops: give up on a closure of more ops.

    Returns:
        None if it cannot be replayed.

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
    # A storage that is only partly made here cannot at the same time be read from outside.
    if any(view.storage in leaves for op in ops.values() for view in op.writes):
        return None
    return Closure(ops=tuple(sorted(ops)), leaves=tuple(sorted(leaves)), made=made)
