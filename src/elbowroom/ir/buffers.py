"""Buffers, and the Layout that assigns them offsets.

offset
  |   +-----+             [lower, upper): a buffer that ends at t and one that begins at t may share
  |---+--+  |  +--        an offset. A buffer with upper < lower wraps around: it is live from `lower` to the
  |      |  |  |          end of the iteration, and from the beginning of the next one to `upper`.
  +------+--+--+-- time
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.errors import InternalError, TraceError

MOST_BYTES = 1 << 62
"""Limit on the total size of all buffers, so that no sum overflows 64 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A block with a lifetime.

    Attributes:
        id: unique.
        lower, upper: live at lower <= t < upper; if upper < lower, at t < upper and at t >= lower.
        alignment: the offset is a multiple of this.
        offset: fixed offset; None if it may be placed anywhere.
    """

    id: int
    lower: int
    upper: int
    nbytes: int
    alignment: int = 1
    offset: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Offsets of buffers in one arena.

    Attributes:
        offsets: one per buffer, in the order of the buffers.
        arena_bytes: end of the highest buffer.
        bound_bytes: lower bound on the arena of any layout.
        is_optimal: whether this layout is proven to be smallest.
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
    """Check that the buffers can have a layout.

    Raises:
        TraceError: a buffer has a negative, empty or too large size or lifetime, an alignment below 1, or a fixed
            offset that is not a multiple of it; two buffers share an id; or two fixed ones overlap. Names them.

    Cost: quadratic in the number of fixed buffers.
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
            f"buffers {one.id} and {other.id} are pinned to offsets {one.offset} and {other.offset}, where they "
            "overlap while both are live"
        )


def find_clash(buffers: Sequence[Buffer], offsets: Sequence[int]) -> tuple[Buffer, Buffer] | None:
    """Return two buffers that overlap in time and address; None if there are none.

    Cost: quadratic. Compares every pair, to stay obviously correct.
    """
    placed = list(zip(buffers, offsets, strict=True))
    for index, (one, offset) in enumerate(placed):
        for other, begin in placed[:index]:
            if offset < begin + other.nbytes and begin < offset + one.nbytes and overlap(one, other):
                return other, one
    return None


def check_layout(buffers: Sequence[Buffer], layout: Layout) -> None:
    """Check a layout against its buffers, slowly but obviously correct.

    Raises:
        InternalError: two buffers overlap in time and address, a buffer is misaligned, below 0 or not at its fixed
            offset, or a figure is wrong.

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
        raise InternalError(f"buffers {clash[0].id} and {clash[1].id} overlap while both are live")
    ends = (offset + buffer.nbytes for buffer, offset in zip(buffers, layout.offsets, strict=True))
    if layout.arena_bytes != max(ends, default=0):
        raise InternalError(f"the arena is said to have {layout.arena_bytes} bytes, and does not")
    if layout.bound_bytes > layout.arena_bytes:
        raise InternalError(f"an arena of {layout.arena_bytes} bytes is below its bound of {layout.bound_bytes}")
