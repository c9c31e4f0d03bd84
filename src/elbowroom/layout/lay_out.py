"""The verb `lay_out`: an allocator by its name, and a judge of what it returns."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom import _family
from elbowroom.ir.buffers import Buffer, Layout, check_layout
from elbowroom.layout import allocators
from elbowroom.progress import announcing

DEFAULT = "auto"

MOST_JUDGED = 3000
"""Up to so many buffers every pair is looked at, which takes some seconds."""


def list_allocators() -> tuple[str, ...]:
    """The names that `lay_out` takes."""
    return _family.names(allocators)


def lay_out(buffers: Sequence[Buffer], allocator: str = DEFAULT, capacity_bytes: int | None = None) -> Layout:
    """Offsets for buffers whose lifetimes are known.

    Args:
        capacity_bytes: what the arena may take; None for any amount.

    Raises:
        UnknownMember: there is no such allocator.
        TraceError: no layout can be for these buffers.
        ArenaTooSmall: they do not fit the capacity.
        UsageError: the allocator does not take buffers that are aligned, pinned or wrap.
    """
    with announcing("laying out buffers", f"{len(buffers):,} of them"):
        layout: Layout = _family.get(allocators, allocator, "assign")(buffers, capacity_bytes)
        if len(buffers) <= MOST_JUDGED:
            check_layout(buffers, layout)
    return layout
