"""A policy's view of the step: primitive queries that a driver answers, and functions built on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from elbowroom.residency.machine import State


class Identified(Protocol):
    """A storage of the step."""

    @property
    def id(self) -> int: ...


class RecomputePath(Protocol):
    """The ops that compute one storage again.

    Attributes:
        seconds: of the ops.
        nbytes: peak bytes that they allocate, including the storage itself.
        leaves: saved storages that they read.
    """

    @property
    def seconds(self) -> float: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def leaves(self) -> Sequence[Identified]: ...


class PolicyContext(Protocol):
    """Queries about the current step. Storages are ids, seconds are on the driver's clock."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that the step may hold on the device."""
        ...

    def now(self) -> float:
        """Return the seconds since the step began."""
        ...

    def busy_seconds(self) -> float:
        """Return how many of these seconds the step's own ops took."""
        ...

    def live_bytes(self) -> int:
        """Return the bytes on the device."""
        ...

    def take_recent_peak(self) -> int:
        """Return the peak of bytes on the device, or requested by an op, since the last call."""
        ...

    def nbytes(self, storage: int) -> int:
        """Return the bytes that a storage takes on the device."""
        ...

    def address(self, storage: int) -> int | None:
        """Return the address of a storage; None where that is not known."""
        ...

    def state(self, storage: int) -> State | None:
        """Return where a storage is; None if it is not saved."""
        ...

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        """Return the seconds to copy bytes to the tier below, and to copy them back."""
        ...

    def copy_out_seconds(self, storage: int) -> float:
        """Return the seconds to copy a storage out: none if it has a copy, infinite if the tier below has no room."""
        ...

    def find_path(self, storage: int) -> RecomputePath | None:
        """Return how a storage can be computed again; None if it cannot."""
        ...

    def may_drop(self, storage: int) -> bool:
        """Tell whether a storage that can be computed again may be dropped."""
        ...

    def may_move(self, storage: int) -> bool:
        """Tell whether a storage may leave the device at all."""
        ...

    def may_leave(self, storage: int) -> bool:
        """Tell whether releasing a storage now would free its bytes, and no pending action needs it."""
        ...

    def add_segment(self, storage: int) -> int:
        """Add a segment that computes a storage again, and return its index. Only where `find_path` finds a path."""
        ...


def spare_bytes(context: PolicyContext) -> int:
    """Return how many more bytes fit into the budget; negative if it is exceeded."""
    return context.budget_bytes - context.live_bytes()


def swap_seconds(context: PolicyContext, storage: int) -> float:
    """Return the seconds to copy a storage out, unless that was done, and back; infinite if there is no room below."""
    return context.copy_out_seconds(storage) + context.move_seconds(context.nbytes(storage))[1]


def list_leaves(context: PolicyContext, storage: int) -> list[int]:
    """Return the saved storages that a storage would be computed from."""
    path = context.find_path(storage)
    return [] if path is None else [leaf.id for leaf in path.leaves]


def replay_seconds(context: PolicyContext, storage: int, most_seconds: float = math.inf) -> float:
    """Return the seconds to compute a storage again, and first to restore the leaves that have left the device.

    Infinite if it may not be dropped, if it or one of these leaves cannot be computed, or if its ops alone take
    `most_seconds`.
    """
    path = context.find_path(storage)
    if path is None or path.seconds >= most_seconds or not context.may_drop(storage):
        return math.inf
    seconds = 0.0
    seen = {storage}
    stack = [path]
    while stack:
        path = stack.pop()
        seconds += path.seconds
        for leaf in path.leaves:
            if leaf.id in seen:
                continue
            state = context.state(leaf.id)
            if state is State.DROPPED:
                seen.add(leaf.id)
                if (path_of_leaf := context.find_path(leaf.id)) is None:
                    return math.inf
                stack.append(path_of_leaf)
            elif state is State.AWAY:
                seen.add(leaf.id)
                seconds += context.move_seconds(context.nbytes(leaf.id))[1]
    return seconds
