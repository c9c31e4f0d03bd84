"""Assign offsets to the copies of a step, in each tier below the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elbowroom.ir.buffers import Buffer, Layout, check_layout
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.layout.free_list import ALIGNMENT_BYTES
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.lay_out import DEFAULT, lay_out

QUICK = ("first_fit", "greedy_by_size", "greedy_by_area", "best_fit")
"""Allocators to try before a search."""

ENOUGH = 1.005
"""A layout within this factor of the bound is good enough: proving the optimum is not worth the time here."""

MOST_WORK = 200_000_000
"""Work limit of the search: about a second."""

MOST_SEARCHED = 2000
"""With more copies, the default allocator is used instead of the search."""

NOTHING = Layout(offsets=(), arena_bytes=0, bound_bytes=0, is_optimal=True)


def lay_out_copies(copy_slots: Sequence[CopySlot], end: int) -> Placement:
    """Assign offsets to copies, ignoring those that they have.

    Args:
        end: one past the last tick of the step. A copy that lives until then may live on into the next step for an
            unknown time, so no other copy shares its bytes.

    Cost: quadratic in the number of copies, plus about a second where no greedy layout is good enough.
    """
    ordered = tuple(
        sorted(
            (copy_slot for copy_slot in copy_slots if copy_slot.nbytes > 0), key=lambda each: (each.storage, each.begin)
        )
    )
    arenas, offsets = dict[bool, int](), [0] * len(ordered)
    for is_on_disk in (False, True):
        chosen = [index for index, copy_slot in enumerate(ordered) if copy_slot.is_on_disk is is_on_disk]
        layout = _lay_out([make_buffer(index, ordered[index], end) for index in chosen])
        arenas[is_on_disk] = layout.arena_bytes
        for index, offset in zip(chosen, layout.offsets, strict=True):
            offsets[index] = offset
    return Placement(
        copy_slots=tuple(
            dataclasses.replace(copy_slot, offset=offset) for copy_slot, offset in zip(ordered, offsets, strict=True)
        ),
        lower_bytes=arenas[False],
        disk_bytes=arenas[True],
    )


def make_buffer(index: int, copy_slot: CopySlot, end: int) -> Buffer:
    """Return the buffer of a copy; a copy that outlives the step is live from tick 0."""
    return Buffer(
        id=index,
        lower=copy_slot.begin if copy_slot.end < end else 0,
        upper=copy_slot.end,
        nbytes=copy_slot.nbytes,
        alignment=ALIGNMENT_BYTES,
    )


def _lay_out(buffers: Sequence[Buffer]) -> Layout:
    """Return the first layout that is good enough; search if no allocator in `QUICK` finds one."""
    if not buffers:
        return NOTHING
    found = []
    for allocator in QUICK:
        found.append(lay_out(buffers, allocator))
        if found[-1].arena_bytes <= ENOUGH * found[-1].bound_bytes:
            return found[-1]
    return _search(buffers, min(found, key=lambda layout: layout.arena_bytes))


def _search(buffers: Sequence[Buffer], layout: Layout) -> Layout:
    """Search for a layout that is good enough; return the best one found."""
    from elbowroom.layout.capacity_search import BestLayout, CapacitySearch  # deferred: imports numba

    if len(buffers) > MOST_SEARCHED:
        return min(layout, lay_out(buffers, DEFAULT), key=lambda each: each.arena_bytes)
    instance = make_instance(buffers)
    # Pretend that anything smaller than good enough is refuted, so that the search stops there.
    found = BestLayout(np.asarray(layout.offsets), layout.arena_bytes, int(ENOUGH * layout.bound_bytes))
    CapacitySearch(instance, found).climb(MOST_WORK)
    layout = finish(instance, found.offsets)
    check_layout(buffers, layout)
    return layout
