"""Facts about the part of a step that ran unwatched, for when the step wakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elbowroom.ir.actions import Release
from elbowroom.ir.trace import Role, Trace
from elbowroom.residency.machine import Drop, Machine, State
from elbowroom.runtime.residence import Residence


def find_outside(bound: Mapping[int, Residence], trace: Trace) -> None:
    """Mark the storages that the step has not made: batches, say. None of its ops were watched so far, but its trace
    tells what they made."""
    made = {home.id for home in trace.storages if home.role in (Role.TEMPORARY, Role.ACTIVATION)}
    for storage, residence in bound.items():
        residence.is_outside = storage not in made


def list_gone(machine: Machine, bound: Iterable[int]) -> list[Release | Drop]:
    """List the storages that have left the device or were dropped so far."""
    storages = list(bound)
    away = [Release(storage) for storage in storages if machine.state(storage) is State.AWAY]
    segments = {storage: machine.segment_of(storage) for storage in storages}
    return away + [Drop(storage, segment) for storage, segment in segments.items() if segment is not None]
