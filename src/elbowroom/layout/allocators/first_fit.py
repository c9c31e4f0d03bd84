"""First fit: buffers in order of allocation, each at the lowest offset that fits."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.layout.instance import finish, make_instance
from elbowroom.layout.portfolio import MEMBERS


def assign(buffers: Sequence[Buffer], capacity_bytes: int | None = None) -> Layout:
    """Assign an offset to every buffer; see `allocators`."""
    instance = make_instance(buffers, capacity_bytes)
    return finish(instance, MEMBERS["first_fit"](instance), capacity_bytes)
