"""Bytes that a step needs if its ops run in slices, however small."""

from __future__ import annotations

from collections.abc import Set

from elbowroom.ir.section_grid import count_view_bytes
from elbowroom.ir.slicing import OpSlicing, count_whole_bytes
from elbowroom.ir.trace import STATE_ROLES, Op, Trace, View
from elbowroom.planner.options import Manages
from elbowroom.planner.slicing.choice import Slices

OVER_LISTS = ("aten._foreach_", "aten._fused_adagrad", "aten._fused_adam", "aten._fused_sgd")
"""Beginnings of the names of ops that run over a part of their lists at a time where state may leave."""


def find_largest_need(trace: Trace, manages: Manages, slices: Slices) -> tuple[str, int]:
    """Return the op that needs most if all ops run in slices and all else is away that may be, and these bytes.

    What ops take inside does not count, so the step may need more. Cost: linear in the trace, times its inputs.
    """
    slicing = {each.tick: each for each in trace.slicing}
    staying = {
        each.id: each
        for each in trace.storages
        if each.created < 0
        and each.id not in trace.present
        and (manages is Manages.ACTIVATIONS or each.role not in STATE_ROLES)
    }
    found = ("", 0)
    for op in trace.ops:
        needed = sum(each.nbytes for each in staying.values() if each.released > op.tick)
        is_split = op.name.startswith(OVER_LISTS) and manages is Manages.EVERYTHING
        if op.writes and not is_split:  # a view of a tensor can be made while that is away
            needed += _count_whole(op, trace, staying.keys(), slicing.get(op.tick), slices)
        if needed > found[1]:
            found = (op.name, needed)
    return found


def _count_whole(op: Op, trace: Trace, staying: Set[int], slicing: OpSlicing | None, slices: Slices) -> int:
    """Return the bytes of an op's other tensors of which each slice needs all; if it cannot be cut, of all of them."""

    def count(view: View) -> int:
        return 0 if view.storage in staying else min(count_view_bytes(view), trace.storages[view.storage].nbytes)

    used: dict[int, int] = {}
    for view in (*op.reads, *op.writes):
        used[view.storage] = max(used.get(view.storage, 0), count(view))
    needed = sum(used.values())
    for passes in () if slicing is None else slicing.alternatives:
        if slices is Slices.ANY or not any(each.sums for each in passes):
            needed = min(needed, count_whole_bytes(passes, list(map(count, op.reads)), list(map(count, op.writes))))
    return needed
