"""Makes the moves at each event of a step: those that the plan alone decides, and the machine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from elbowroom.errors import TransferFailed
from elbowroom.ir.events import StorageNeeded, StorageSaved
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.event_log import NO_STORAGE
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.packed import PackedTensor
from elbowroom.runtime.planned_moves import PLACES, PlannedMoves
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_policy import StepPolicy
from elbowroom.runtime.step_state import StepState


class StepMoves:
    """Makes the moves of one step.

    Storages that the plan only copies are moved without the machine, until something does not go as planned.

    Args:
        state, policy, executor: of the step.
        planned: makes the plan's copies; None if the machine makes all moves.
        find_retire: returns what `PackedTensor` calls at its end.
        observer: of the step; if there is one, all events are reported at once.
    """

    def __init__(
        self,
        state: StepState,
        policy: StepPolicy,
        executor: ActionExecutor,
        planned: PlannedMoves | None,
        find_retire: Callable[[], Callable[[int, SavedStorage | None], None] | None],
        observer: Observer | None,
    ) -> None:
        self._state = state
        self._machine = state.machine
        self._saved_tensors = state.saved_tensors
        self._policy = policy
        self._executor = executor
        self._planned = planned
        self._find_retire = find_retire
        self._is_observed = observer is not None
        if planned is not None:
            policy.leave_out_copies()

    @property
    def copied_storages(self) -> frozenset[int]:
        """Ids of the storages that are moved without the machine."""
        return frozenset() if self._planned is None else self._state.candidates[0].copied_storages

    @property
    def due_tick(self) -> int:
        """Tick of the next move of the plan."""
        due_tick = self._policy.due_tick
        return due_tick if self._planned is None else min(due_tick, self._planned.due_tick)

    def make(self, event: StorageSaved | StorageNeeded) -> None:
        """Make the moves that are due at an event of a storage that is there."""
        self._leave(event.tick)
        if actions := self._machine.feed(event):
            self._executor.perform(actions)
        self._come_back(event.tick)

    def make_due(self, tick: int) -> None:
        """Make the moves that are due at an event of which the machine need not know."""
        self._leave(tick)
        if self._policy.due_tick <= tick:
            self._executor.perform(self._machine.feed(StorageNeeded(NO_STORAGE, tick)))
        self._come_back(tick)

    def serve(self, packed: PackedTensor, saved: SavedStorage, tick: int) -> torch.Tensor:
        """Make the moves that are due at a need, and return the needed tensor."""
        self._leave(tick)
        actions = self._machine.feed(StorageNeeded(saved.record.id, tick))
        given = self._executor.serve(saved, packed.index, actions) if actions else saved.view(packed.index)
        self._state.watcher.note_saved(given)  # a compiled graph holds all that it is given to its end
        self._come_back(tick)
        return given

    def bring(self, save: Any, storage: int, tick: int) -> torch.Tensor:
        """Return a saved tensor whose storage was moved as planned and is not there, and make the moves that are due.

        Raises:
            TransferFailed: it could not be read.
        """
        if self._planned is not None and not self._planned.bring(storage):
            self.take_over()
        given: torch.Tensor | None = self._saved_tensors.make(save)
        if given is None:
            return self.serve(save.handle, save.handle.residence, tick)
        self.make_due(tick)
        return given

    def take_over(self) -> None:
        """Have the machine track the storages that were moved as planned, and move them from now on.

        Raises:
            TransferFailed: an offload has failed, and the plan has no room for the storage.
        """
        planned = self._planned
        if planned is None:
            return
        self._saved_tensors.settle(self._pack, only_planned=True)
        self._policy.take_over(planned.begun_tick)
        self._saved_tensors.due_tick = self._policy.due_tick
        self._end_planned()

    def take_over_all(self) -> None:
        """Have the machine track all storages of which saves were only logged."""
        self._saved_tensors.settle(self._pack, only_planned=False)
        self._end_planned()

    def _leave(self, tick: int) -> None:
        planned = self._planned
        if planned is not None and not planned.leave(tick):
            self.take_over()

    def _come_back(self, tick: int) -> None:
        planned = self._planned
        if planned is not None and not planned.come_back(tick):
            self.take_over()
            if actions := self._machine.feed(StorageNeeded(NO_STORAGE, tick)):
                self._executor.perform(actions)
        if self._state.phase.follows_plan and not self._is_observed:
            self._saved_tensors.due_tick = self.due_tick

    def _end_planned(self) -> None:
        """Discard what storages that are gone have left, and deal with an offload that failed."""
        planned, self._planned = self._planned, None
        if planned is not None:
            planned.discard_freed()
            if planned.failed is not None:
                storage, why = planned.failed
                saved = self._state.storages.by_id.get(storage)
                if saved is not None and not self._executor.stay(saved, why):
                    raise TransferFailed(why)

    def _pack(self, save: Any, planned: tuple[Any, bool, int, Any, Any, Any] | None) -> PackedTensor:
        """Return the object that stands for a tensor from now on, of which only the save was logged.

        Args:
            planned: of a save whose storage was moved as planned: its view; whether it is the first of its storage, and
                then the storage's place and copy; the storage that came back, and the one that was released last.
        """
        saved: SavedStorage = save.residence
        self._machine.add(saved.id)
        self._state.storages.by_id[saved.id] = saved
        if planned is None:
            saved.add_view(save.index, save.tensor)
            if save.is_written:
                saved.may_move = False
        else:
            view, is_first, place, copy, storage, released = planned
            if is_first:
                self._machine.correct(saved.id, PLACES[place], copied=copy is not None)
                saved.take_over(copy, storage, released)
            saved.keep_view(save.index, view)
        retire = self._find_retire()
        assert retire is not None
        return PackedTensor(retire, save.index, saved, save.version)
