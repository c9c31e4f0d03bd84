"""Moves of the model's state on the virtual device, among the events of a step."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.ir.events import Event, StorageFreed
from elbowroom.ir.state import MoveKind, StateMove
from elbowroom.simulator.driver import VirtualDevice

# Order within one tick: claims end, the op's state arrives, the entry runs, and then state leaves.
_FREED, _BEFORE, _ENTRY, _AFTER = range(4)


def merge_moves(events: Sequence[Event], moves: Sequence[StateMove]) -> list[Event | StateMove]:
    """Return events and moves in order of time; both are sorted."""
    return sorted([*events, *moves], key=_find_place) if moves else list(events)


def move_state(device: VirtualDevice, move: StateMove) -> None:
    """Carry out one move."""
    if move.kind is MoveKind.RELOAD:
        device.reload(move.storage)
    elif move.kind is MoveKind.COPY:
        device.offload(move.storage)
    else:
        device.wait(move.storage)


def _find_place(item: Event | StateMove) -> tuple[int, int]:
    if isinstance(item, StateMove):
        return item.tick, _BEFORE if item.kind.is_before else _AFTER
    return item.tick, _FREED if isinstance(item, StorageFreed) else _ENTRY
