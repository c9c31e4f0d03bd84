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

import numpy as np

from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.fitting import fit
from elbowroom.layout.instance import finish, make_instance, select
from elbowroom.layout.orders import order_by


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`.

    Raises:
        UsageError: some buffers cross the iteration and some are pinned, which the two regions have no place for.
    """
    instance = make_instance(buffers, capacity_bytes)
    crossing, inside = np.flatnonzero(instance.wrap > 0), np.flatnonzero(instance.wrap == 0)
    if not len(crossing):
        return finish(instance, fit(instance, order_by(instance, instance.nbytes), best=True), capacity_bytes)
    if (instance.pinned >= 0).any():
        raise UsageError(
            "best_fit keeps two regions for buffers that cross the iteration, beside which nothing can be pinned; "
            "choose another allocator"
        )
    offsets = np.zeros(len(buffers), np.int64)
    region = 0
    for chosen in (crossing, inside):
        part = select(instance, chosen)
        offsets[chosen] = fit(part, order_by(part, part.nbytes), best=True)
        if chosen is crossing:
            region = int((offsets[chosen] + part.nbytes).max())
            continue
        unit = int(np.lcm.reduce(np.unique(part.alignment))) if len(chosen) else 1
        offsets[chosen] += -(-2 * region // unit) * unit
    return finish(instance, offsets, capacity_bytes)
