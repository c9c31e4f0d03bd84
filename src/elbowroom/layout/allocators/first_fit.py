"""First fit: buffers in the order in which they come into being, each at the lowest offset that has room."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Offsets of all buffers; see `allocators`."""
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["first_fit"](instance), capacity_bytes)
