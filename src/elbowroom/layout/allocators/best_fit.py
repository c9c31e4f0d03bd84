"""SmartPool's best fit: largest buffer first, each in the smallest gap that fits it.

    offset   2X ... buffers that live within one iteration
             X .. 2X    second copy of the region below
             0 .. X     buffers that cross from one iteration into the next

Buffers that cross are placed in a region of their own, which is double-buffered: iterations alternate between the two
copies.

Source: Zhang et al., "Efficient Memory Management for GPU-based Deep Learning Systems", arXiv 1903.06631, and its code
in two pull requests to SINGA. That code ignores the gap below the lowest block and adds addresses in 32 bits; this one
does neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Assign an offset to every buffer; see `allocators`.

    Raises:
        UsageError: some buffers cross the iteration and others are pinned, which the two regions do not support.
    """
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["best_fit"](instance), capacity_bytes)
