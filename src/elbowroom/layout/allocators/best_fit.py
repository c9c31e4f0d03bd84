"""SmartPool's best fit: the largest buffer first, each into the smallest gap that has room for it.

    offset   2X ... what lives within one iteration
             X .. 2X    the second copy of the region below it
             0 .. X     what crosses from one iteration into the next

Blocks that cross are placed by themselves, in a region that is there twice and is used by turns.

Source: Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", arXiv 1903.06631, and its code
in two pull requests to SINGA. That code never looks at the gap below the lowest block and adds addresses in 32 bits;
this does neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`.

    Raises:
        UsageError: some buffers cross the iteration and some are pinned, which the two regions have no place for.
    """
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["best_fit"](instance), capacity_bytes)
