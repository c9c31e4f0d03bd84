"""omnimalloc's own default allocator, where that package is installed: a rival to compare with.

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
    """Offsets of all buffers; see `allocators`.

    Raises:
        UsageError: the package is not installed, or buffers wrap, are aligned or pinned.
    """
    instance = make_instance(buffers, capacity_bytes)
    try:
        rival = importlib.import_module("omnimalloc")
    except ImportError as error:
        raise UsageError("the allocator omnimalloc needs the package omnimalloc, which is not installed") from error
    if any(buffer.upper < buffer.lower or buffer.alignment > 1 or buffer.offset is not None for buffer in buffers):
        raise UsageError("omnimalloc is asked only for buffers that neither wrap nor are aligned or pinned")
    wanted = tuple(
        rival.Allocation(id=buffer.id, size=buffer.nbytes, start=buffer.lower, end=buffer.upper) for buffer in buffers
    )
    placed = {each.id: each.offset for each in rival.allocate(wanted)}
    offsets = np.array([placed[buffer.id] for buffer in buffers], np.int64)
    return finish(instance, offsets, capacity_bytes)
