"""Buffers, which want a place, and a Layout, which gives it to them.

offset
  |   +-----+             [lower, upper): what ends at a time and what begins there may share an offset.
  |---+--+  |  +--        A buffer with upper < lower wraps: it is there from `lower` to the end of the
  |      |  |  |          iteration, and from the beginning of the next one to `upper`.
  +------+--+--+-- time
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.errors import InternalError, TraceError

MOST_BYTES = 1 << 62
"""All buffers together stay below this, so that no sum of theirs leaves 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A block with a lifetime.

    Attributes:
        id: what tells it from the others.
        lower, upper: it is there at times lower <= t < upper; if upper < lower, at t < upper and at lower <= t.
        nbytes: its size.
        alignment: its offset is a multiple of this.
        offset: where it must be; None for anywhere.
    """

    id: int
    lower: int
    upper: int
    nbytes: int
    alignment: int = 1
    offset: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where buffers lie.

    Attributes:
        offsets: of each buffer, in their order.
        arena_bytes: one past the highest byte of any of them.
        bound_bytes: no layout of these buffers takes less.
        is_optimal: whether it is proven that none takes less than this one.
    """

    offsets: tuple[int, ...] = dataclasses.field(repr=False)
    arena_bytes: int
    bound_bytes: int
    is_optimal: bool


def overlap(one: Buffer, other: Buffer) -> bool:
    """Return True if the lifetimes of two buffers overlap."""
    return any(max(lower, low) < min(upper, up) for lower, upper in _spans(one) for low, up in _spans(other))


def _spans(buffer: Buffer) -> tuple[tuple[float, float], ...]:
    if buffer.lower < buffer.upper:
        return ((buffer.lower, buffer.upper),)
    return ((buffer.lower, float("inf")), (float("-inf"), buffer.upper))


def check_buffers(buffers: Sequence[Buffer]) -> None:
    """Refuse buffers that no layout can be for.

    Raises:
        TraceError: a buffer has a negative, empty or too large size or lifetime, an alignment below 1 or a pinned
            offset that is not a multiple of it; two have one id; or two pinned ones lie upon each other. Names them.

    Cost: quadratic in the buffers that are pinned.
    """
    seen: set[int] = set()
    for place, buffer in enumerate(buffers):
        name = f"buffer {buffer.id}"
        if buffer.id in seen:
            raise TraceError(f"{name}, at place {place}, has the id of another")
        seen.add(buffer.id)
        if buffer.nbytes <= 0:
            raise TraceError(f"{name} has {buffer.nbytes} bytes; what has none needs no place")
        if buffer.lower < 0 or buffer.upper < 0:
            raise TraceError(f"{name} lives from {buffer.lower} to {buffer.upper}; times begin at 0")
        if buffer.lower == buffer.upper:
            raise TraceError(f"{name} is never there: it begins and ends at {buffer.lower}")
        if max(buffer.lower, buffer.upper) >= MOST_BYTES:
            raise TraceError(f"{name} lives from {buffer.lower} to {buffer.upper}: times stay below 2**62")
        if buffer.alignment < 1:
            raise TraceError(f"{name} has alignment {buffer.alignment}; 1 is none")
        if buffer.offset is not None and (buffer.offset < 0 or buffer.offset % buffer.alignment):
            raise TraceError(f"{name} is pinned to {buffer.offset}, which is no multiple of {buffer.alignment}")
    total = sum(buffer.nbytes + buffer.alignment for buffer in buffers)
    highest = max((buffer.offset for buffer in buffers if buffer.offset is not None), default=0)
    if total + highest >= MOST_BYTES:
        raise TraceError(f"{total} bytes above offset {highest} are more than 2**62, which no arena has")
    pinned = [buffer for buffer in buffers if buffer.offset is not None]
    clash = find_clash(pinned, [buffer.offset or 0 for buffer in pinned])
    if clash is not None:
        one, other = clash
        raise TraceError(
            f"buffers {one.id} and {other.id} are pinned to offsets {one.offset} and {other.offset}, where one lies "
            "upon the other while both are there"
        )


def find_clash(buffers: Sequence[Buffer], offsets: Sequence[int]) -> tuple[Buffer, Buffer] | None:
    """Two buffers that lie upon each other while both are there; None if there are none.

    Cost: quadratic. It looks at every pair, so that there is nothing to get wrong.
    """
    placed = list(zip(buffers, offsets, strict=True))
    for index, (one, offset) in enumerate(placed):
        for other, begin in placed[:index]:
            if offset < begin + other.nbytes and begin < offset + one.nbytes and overlap(one, other):
                return other, one
    return None


def check_layout(buffers: Sequence[Buffer], layout: Layout) -> None:
    """The judge of layouts: slow and obvious.

    Raises:
        InternalError: two buffers overlap in time and address, one is not aligned, not where it is pinned or below 0,
            or a figure is not what it says.

    Cost: quadratic in the number of buffers.
    """
    if len(layout.offsets) != len(buffers):
        raise InternalError(f"{len(layout.offsets)} offsets for {len(buffers)} buffers")
    for buffer, offset in zip(buffers, layout.offsets, strict=True):
        if offset < 0 or offset % buffer.alignment:
            raise InternalError(f"buffer {buffer.id} is at {offset}, which is no multiple of {buffer.alignment}")
        if buffer.offset is not None and offset != buffer.offset:
            raise InternalError(f"buffer {buffer.id} is at {offset} and pinned to {buffer.offset}")
    clash = find_clash(buffers, layout.offsets)
    if clash is not None:
        raise InternalError(f"buffers {clash[0].id} and {clash[1].id} lie upon each other while both are there")
    ends = (offset + buffer.nbytes for buffer, offset in zip(buffers, layout.offsets, strict=True))
    if layout.arena_bytes != max(ends, default=0):
        raise InternalError(f"the arena is said to have {layout.arena_bytes} bytes, and does not")
    if layout.bound_bytes > layout.arena_bytes:
        raise InternalError(f"an arena of {layout.arena_bytes} bytes is below its bound of {layout.bound_bytes}")
