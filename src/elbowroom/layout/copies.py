"""Offsets for the copies of a step, in each of the tiers below the device."""

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
"""Tried before any search."""

ENOUGH = 1.005
"""So near the bound, nothing better is looked for: to prove an optimum takes longer than it is worth here."""

MOST_WORK = 200_000_000
"""Of a search, in units of 3 nanoseconds, more or less."""

MOST_SEARCHED = 2000
"""Of more copies, what the default allocator finds has to do."""

NOTHING = Layout(offsets=(), arena_bytes=0, bound_bytes=0, is_optimal=True)


def lay_out_copies(copy_slots: Sequence[CopySlot], end: int) -> Placement:
    """Offsets for copies, whatever those that they have.

    Args:
        end: one past the last tick of the step. What is there until then may live on into the next step, nobody knows
            how long: no other copy gets a place that it could be found in.

    Cost: quadratic in the number of copies; about a second besides where no order of them is good enough.
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
    """A copy as what wants an offset."""
    return Buffer(
        id=index,
        lower=copy_slot.begin if copy_slot.end < end else 0,
        upper=copy_slot.end,
        nbytes=copy_slot.nbytes,
        alignment=ALIGNMENT_BYTES,
    )


def _lay_out(buffers: Sequence[Buffer]) -> Layout:
    """A layout that is good enough, by the first allocator that finds one; by a search, if none does."""
    if not buffers:
        return NOTHING
    found = []
    for allocator in QUICK:
        found.append(lay_out(buffers, allocator))
        if found[-1].arena_bytes <= ENOUGH * found[-1].bound_bytes:
            return found[-1]
    return _search(buffers, min(found, key=lambda layout: layout.arena_bytes))


def _search(buffers: Sequence[Buffer], layout: Layout) -> Layout:
    """A layout that is good enough, if the search finds one; the best that it finds otherwise."""
    from elbowroom.layout.capacity_search import BestLayout, CapacitySearch  # a compiler comes with it

    if len(buffers) > MOST_SEARCHED:
        return min(layout, lay_out(buffers, DEFAULT), key=lambda each: each.arena_bytes)
    instance = make_instance(buffers)
    # As if it were known that nothing better than enough can be had: the search ends where it has found that.
    found = BestLayout(np.asarray(layout.offsets), layout.arena_bytes, int(ENOUGH * layout.bound_bytes))
    CapacitySearch(instance, found).climb(MOST_WORK)
    layout = finish(instance, found.offsets)
    check_layout(buffers, layout)
    return layout
