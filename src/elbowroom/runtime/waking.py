"""Facts about the part of a step that ran unwatched, for when the step wakes."""

from __future__ import annotations

from collections.abc import Iterable

from elbowroom.ir.actions import Release
from elbowroom.residency.machine import Drop, Machine, State


def list_gone(machine: Machine, bound: Iterable[int]) -> list[Release | Drop]:
    """List the storages that have left the device or were dropped so far."""
    storages = list(bound)
    away = [Release(storage) for storage in storages if machine.state(storage) is State.AWAY]
    segments = {storage: machine.segment_of(storage) for storage in storages}
    return away + [Drop(storage, segment) for storage, segment in segments.items() if segment is not None]
