"""Greedy by size: largest buffer first, each at the lowest offset that fits.

Source: Pisarchyk, Lee, "Efficient Memory Management for Deep Neural Net Inference", 2020 (greedy by size); the default
of most neural network compilers.
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Assign an offset to every buffer; see `allocators`."""
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["greedy_by_size"](instance), capacity_bytes)
