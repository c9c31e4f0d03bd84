"""`lay_out`: run an allocator by name, and check its layout."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom import _family
from elbowroom.ir.buffers import Buffer, Layout, check_layout
from elbowroom.layout import allocators
from elbowroom.progress import announcing

DEFAULT = "auto"

MOST_JUDGED = 3000
"""Up to so many buffers, every pair of the layout is checked for overlap, which takes some seconds."""


def list_allocators() -> tuple[str, ...]:
    """Return the names that `lay_out` accepts."""
    return _family.names(allocators)


def lay_out(buffers: Sequence[Buffer], allocator: str = DEFAULT, capacity_bytes: int | None = None) -> Layout:
    """Assign offsets to buffers with known lifetimes.

    Args:
        capacity_bytes: limit on the size of the arena; None for no limit.

    Raises:
        UnknownMember: there is no such allocator.
        TraceError: the buffers have no valid layout.
        ArenaTooSmall: the layout exceeds the capacity.
        UsageError: the allocator does not support buffers that are aligned, pinned or wrap.
    """
    with announcing("laying out buffers", f"{len(buffers):,} of them"):
        layout: Layout = _family.get(allocators, allocator, "assign")(buffers, capacity_bytes)
        if len(buffers) <= MOST_JUDGED:
            check_layout(buffers, layout)
    return layout
