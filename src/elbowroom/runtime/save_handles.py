"""Handles that replace saved tensors in autograd's graph once their storage moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from elbowroom.residency.machine import State
from elbowroom.runtime.packed_tensor import PackedTensor
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.step_storages import load_native

PLACES = State.RESIDENT, State.LEAVING, State.AWAY, State.ARRIVING
"""Numbers of `PlannedStorage::Place`."""


class SaveHandles:
    """Takes saved tensors over from the extension, which keeps them until then.

    Args:
        state: of the step.
        find_retire: returns the function that forgets `retired`. It is called after each of them.

    Attributes:
        retired: saves whose packed tensors died, by index, with their storages.
    """

    def __init__(self, state: StepState, find_retire: Callable[[], Callable[[], None] | None]) -> None:
        self._state = state
        self._find_retire = find_retire
        self.retired: deque[tuple[int, SavedStorage | None]] = deque()

    def pack(self, index: int, saved: SavedStorage | None, version: int) -> PackedTensor:
        """Return what stands for a saved tensor. `version`: the tensor's version counter when it was saved."""
        retire = self._find_retire()
        assert retire is not None
        packed: PackedTensor = load_native().PackedTensor(self.retired.append, retire, index, saved, version)
        return packed

    def take_all(self) -> None:
        """Take over all saved tensors whose storages may move."""
        self._state.saved_tensors.settle(self._make, only_planned=False)

    def take_planned(self) -> None:
        """Take over those whose storages were moved as planned."""
        self._state.saved_tensors.settle(self._make, only_planned=True)

    def take(self, saved: SavedStorage) -> None:
        """Take over the saved tensors of one storage, before it moves."""
        if saved.record.kept_count:
            self._state.saved_tensors.hand_over(saved.record, self._make)

    def find_new(self) -> None:
        """Have the machine track the storages saved since the last call, whose tensors the extension keeps."""
        for saved, is_written in self._state.saved_tensors.take_new():
            self._track(saved)
            saved.record.is_guarded = True
            if is_written:
                saved.may_move = False

    def _track(self, saved: SavedStorage) -> None:
        self._state.machine.add(saved.id)
        self._state.storages.by_id[saved.id] = saved

    def _make(self, save: Any, planned: tuple[Any, bool, int, Any, Any, Any] | None) -> PackedTensor:
        """Return the object that stands for a tensor from now on, of which only the save was logged.

        Args:
            planned: of a save whose storage was moved as planned: its view; whether it is the first of its storage, and
                then the storage's place and copy; the storage that came back, and the one that was released last.
        """
        saved: SavedStorage = save.residence
        self._track(saved)
        if planned is None:
            if (tensor := save.tensor) is not None:  # else another thread has released it
                saved.add_view(save.index, tensor)
            if save.is_written:
                saved.may_move = False
        else:
            view, is_first, place, copy, storage, released = planned
            if is_first:
                self._state.machine.correct(saved.id, PLACES[place], copied=copy is not None)
                saved.take_over(copy, storage, released)
            saved.keep_view(save.index, view)
        return self.pack(save.index, saved, save.version)
