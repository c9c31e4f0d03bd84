"""Bytes that a step needs if its ops run in slices, however small."""

from __future__ import annotations

from elbowroom.ir.section_grid import count_view_bytes
from elbowroom.ir.slicing import OpSlicing, count_whole_bytes
from elbowroom.ir.trace import STATE_ROLES, Op, Trace
from elbowroom.planner.options import Manages
from elbowroom.planner.slicing.choice import Slices

OVER_LISTS = ("aten._foreach_", "aten._fused_")
"""Beginnings of the names of ops that run over a part of their lists at a time where state may leave."""


def find_obstacle(trace: Trace, budget_bytes: int, manages: Manages, slices: Slices) -> tuple[Op, int] | None:
    """Return the op that needs most if all ops run in slices and all else is away that may be, and these bytes.

    None if that is within the budget; the step may have no room all the same, as what ops take inside does not count.
    """
    slicing = {each.tick: each for each in trace.slicing}
    staying = [
        each
        for each in trace.storages
        if each.created < 0 and (manages is Manages.ACTIVATIONS or each.role not in STATE_ROLES)
    ]
    sizes = [each.nbytes for each in trace.storages]
    found: tuple[Op, int] | None = None
    for op in trace.ops:
        used = {view.storage for view in (*op.reads, *op.writes)}
        beside = sum(each.nbytes for each in staying if each.released > op.tick and each.id not in used)
        is_split = op.name.startswith(OVER_LISTS) and manages is Manages.EVERYTHING
        least = beside
        if op.writes and not is_split:  # a view of a tensor can be made while that is away
            least += _count_least(op, sizes, slicing.get(op.tick), slices)
        if least > (budget_bytes if found is None else found[1]):
            found = (op, least)
    return found


def _count_least(op: Op, sizes: list[int], slicing: OpSlicing | None, slices: Slices) -> int:
    """Return the bytes of an op's tensors of which each slice needs all; without slices, of all of them."""
    whole = {view.storage: 0 for view in (*op.reads, *op.writes)}
    for view in (*op.reads, *op.writes):
        whole[view.storage] = max(whole[view.storage], min(count_view_bytes(view), sizes[view.storage]))
    least = sum(whole.values())
    if slicing is None:
        return least
    read_bytes, result_bytes = ([count_view_bytes(view) for view in views] for views in (op.reads, op.writes))
    allowed = [
        passes for passes in slicing.alternatives if slices is Slices.ANY or not any(each.sums for each in passes)
    ]
    return min([least, *(count_whole_bytes(passes, read_bytes, result_bytes) for passes in allowed)])
