"""The default allocator of the omnimalloc package, if that is installed, as a baseline.

Source: https://github.com/fpedd/omnimalloc (Apache-2.0).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np

from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Assign an offset to every buffer; see `allocators`.

    Raises:
        UsageError: the package is not installed, or buffers wrap, are pinned, or differ in alignment.
    """
    instance = make_instance(buffers, capacity_bytes)
    try:
        rival = importlib.import_module("omnimalloc")
    except ImportError as error:
        raise UsageError("the allocator omnimalloc needs the package omnimalloc, which is not installed") from error
    units = {buffer.alignment for buffer in buffers}
    if len(units) > 1 or any(buffer.upper < buffer.lower or buffer.offset is not None for buffer in buffers):
        raise UsageError("omnimalloc supports only buffers of one alignment that neither wrap nor are pinned")
    unit = units.pop() if units else 1  # omnimalloc has no alignment: sizes are counted in units of it
    wanted = tuple(
        rival.Allocation(id=place, size=-(-buffer.nbytes // unit), start=buffer.lower, end=buffer.upper)
        for place, buffer in enumerate(buffers)
    )
    placed = {each.id: each.offset * unit for each in rival.allocate(wanted)}
    offsets = np.array([placed[place] for place in range(len(buffers))], np.int64)
    return finish(instance, offsets, capacity_bytes)
