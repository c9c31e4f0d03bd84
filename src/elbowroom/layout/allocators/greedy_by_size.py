"""The largest buffer first, each at the lowest offset that has room.

Source: Pisarchyk, Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020 (greedy by size); the default
of most compilers for neural nets.
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`."""
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["greedy_by_size"](instance), capacity_bytes)
