"""Buffers as columns: the input of every allocator, compiled or not.

Time is divided into sections: a new section starts where a buffer begins after another has ended. All buffers of a
section overlap in time, so they need disjoint addresses, and the bytes of the fullest section are a lower bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from elbowroom.errors import ArenaTooSmall
from elbowroom.ir.buffers import Buffer, Layout, check_buffers

Array = Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Instance:
    """Buffers as columns, in their order.

    Attributes:
        buffers: the buffers themselves.
        first, last, wrap: sections of each buffer, [first, last) and [0, wrap).
        nbytes, alignment: of each buffer.
        pinned: required offset of each buffer; -1 for any.
        sections: number of sections.
        loads: live bytes in each section.
        bound_bytes: lower bound on the arena of any layout.
    """

    buffers: tuple[Buffer, ...]
    first: Array
    last: Array
    wrap: Array
    nbytes: Array
    alignment: Array
    pinned: Array
    sections: int
    loads: Array
    bound_bytes: int

    @property
    def lengths(self) -> Array:
        """Number of sections that each buffer is live in."""
        return self.last - self.first + self.wrap


def make_instance(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Instance:
    """Convert buffers to columns.

    Raises:
        TraceError: `check_buffers` rejects them.
        ArenaTooSmall: the capacity is below the bound.
    """
    check_buffers(buffers)
    columns = {
        name: np.fromiter((getattr(buffer, name) for buffer in buffers), np.int64, len(buffers))
        for name in ("lower", "upper", "nbytes", "alignment")
    }
    pinned = np.fromiter((-1 if each.offset is None else each.offset for each in buffers), np.int64, len(buffers))
    first, last, wrap, sections = cut_sections(columns["lower"], columns["upper"])
    nbytes, alignment = columns["nbytes"], columns["alignment"]
    loads = sum_loads(first, last, wrap, nbytes, sections)
    instance = Instance(
        buffers=tuple(buffers), first=first, last=last, wrap=wrap, nbytes=nbytes, alignment=alignment, pinned=pinned,
        sections=sections, loads=loads, bound_bytes=_find_bound(first, last, wrap, nbytes, alignment, pinned, loads),
    )  # fmt: skip
    if capacity_bytes is not None and capacity_bytes < instance.bound_bytes:
        raise ArenaTooSmall(capacity_bytes, instance.bound_bytes, find_fullest(instance), is_proven=True)
    return instance


def cut_sections(lower: Array, upper: Array) -> tuple[Array, Array, Array, int]:
    """Return the sections [first, last) and [0, wrap) of each lifetime, and the number of sections."""
    count = len(lower)
    if not count:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty, 0
    times = np.concatenate([upper, lower])
    begins = np.repeat([False, True], count)
    order = np.lexsort((begins, times))  # at equal times, ends come first
    begin = begins[order]
    wraps = upper < lower
    # A section closes at an end that follows a beginning, or, where buffers wrap, at the very first end.
    before = np.concatenate([[bool(wraps.any())], begin[:-1]])
    done = np.cumsum(~begin & before)
    place = np.empty(2 * count, np.int64)
    place[order] = done
    ends, starts = place[:count], place[count:]
    sections = int(done[-1]) + (1 if begin[-1] else 0)
    return (
        starts,
        np.where(wraps, sections, ends),
        np.where(wraps, ends, 0),
        sections,
    )


def sum_loads(first: Array, last: Array, wrap: Array, nbytes: Array, sections: int) -> Array:
    """Return the live bytes in each section."""
    change = np.zeros(sections + 1, np.int64)
    np.add.at(change, first, nbytes)
    np.add.at(change, last, -nbytes)
    change[0] += int(nbytes[wrap > 0].sum())
    np.add.at(change, wrap[wrap > 0], -nbytes[wrap > 0])
    return np.cumsum(change)[:sections]


def _find_bound(
    first: Array, last: Array, wrap: Array, nbytes: Array, alignment: Array, pinned: Array, loads: Array
) -> int:
    """Return the load of the fullest section, with the alignment padding of all its buffers but the topmost."""
    if not len(loads):
        return 0
    bound = max(int(loads.max()), int((pinned + nbytes)[pinned >= 0].max(initial=0)))
    grain = math.gcd(*map(int, np.unique(alignment)))
    rounded = -(-nbytes // grain) * grain
    with_rounding = sum_loads(first, last, wrap, rounded, len(loads)).max() - (rounded - nbytes).max()
    return max(bound, int(with_rounding))


def find_fullest(instance: Instance, most: int = 5) -> tuple[tuple[str, int], ...]:
    """Return name and bytes of the largest buffers of the fullest section, largest first."""
    section = int(np.argmax(instance.loads))
    inside = ((instance.first <= section) & (section < instance.last)) | (section < instance.wrap)
    found = [instance.buffers[index] for index in np.flatnonzero(inside)]
    found.sort(key=lambda buffer: (-buffer.nbytes, buffer.id))
    return tuple((f"buffer {buffer.id}", buffer.nbytes) for buffer in found[:most])


def finish(
    instance: Instance, offsets: Array, capacity_bytes: int | None = None, *, is_optimal: bool = False
) -> Layout:
    """Return the layout with these offsets.

    Raises:
        ArenaTooSmall: it does not fit the capacity.
    """
    arena = int((offsets + instance.nbytes).max(initial=0))
    if capacity_bytes is not None and arena > capacity_bytes:
        raise ArenaTooSmall(capacity_bytes, arena, find_fullest(instance), is_proven=is_optimal)
    return Layout(
        offsets=tuple(map(int, offsets)),
        arena_bytes=arena,
        bound_bytes=instance.bound_bytes,
        is_optimal=is_optimal or arena == instance.bound_bytes,
    )


def select(instance: Instance, chosen: Array) -> Instance:
    """Return an instance of the chosen buffers, in the order of `chosen`."""
    buffers = tuple(instance.buffers[index] for index in chosen)
    return make_instance(buffers)
