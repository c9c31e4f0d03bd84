"""What a step that wakes has to know of the part of it that nobody watched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elbowroom.ir.actions import Release
from elbowroom.ir.trace import Role, Trace
from elbowroom.residency.machine import Drop, Machine, State
from elbowroom.runtime.residence import Residence


def find_outside(bound: Mapping[int, Residence], trace: Trace) -> None:
    """Tell a batch from what the step has made, before ops were looked at. What no op touches any more, and neither
    autograd nor the model holds, is never counted."""
    made = {home.id for home in trace.storages if home.role in (Role.TEMPORARY, Role.ACTIVATION)}
    for storage, residence in bound.items():
        residence.is_outside = storage not in made


def list_gone(machine: Machine, bound: Iterable[int]) -> list[Release | Drop]:
    """What has left the device or was dropped so far."""
    storages = list(bound)
    away = [Release(storage) for storage in storages if machine.state(storage) is State.AWAY]
    segments = {storage: machine.segment_of(storage) for storage in storages}
    return away + [Drop(storage, segment) for storage, segment in segments.items() if segment is not None]
