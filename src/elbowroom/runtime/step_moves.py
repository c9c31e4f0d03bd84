"""Makes the moves at each event of a step: those that the plan alone decides, and the machine's."""

from __future__ import annotations

from typing import Any

import torch

from elbowroom.ir.events import StorageNeeded, StorageSaved
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.event_log import NO_STORAGE
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.packed_tensor import PackedTensor
from elbowroom.runtime.planned_moves import PlannedMoves
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_policy import StepPolicy
from elbowroom.runtime.step_state import StepState


class StepMoves:
    """Makes the moves of one step.

    Storages that the plan only copies are moved without the machine, until something does not go as planned.

    Args:
        state, policy, executor: of the step.
        planned: makes the plan's copies; None if the machine makes all moves.
        handles: takes over saved tensors before their storages move.
        observer: of the step; if there is one, all events are reported at once.
    """

    def __init__(
        self,
        state: StepState,
        policy: StepPolicy,
        executor: ActionExecutor,
        planned: PlannedMoves | None,
        handles: SaveHandles,
        observer: Observer | None,
    ) -> None:
        self._state = state
        self._machine = state.machine
        self._saved_tensors = state.saved_tensors
        self._policy = policy
        self._executor = executor
        self._planned = planned
        self._handles = handles
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
            TierError: it could not be read.
        """
        if self._planned is not None and not self._planned.bring(storage):
            self.take_over()
        given: torch.Tensor | None = self._saved_tensors.make(save)
        if given is None:
            return self.serve(save.handle, save.handle.residence, tick)
        self.make_due(tick)
        return given

    def take_over(self) -> None:
        """Have the machine track the storages that were moved as planned, and move them from now on."""
        planned = self._planned
        if planned is None:
            return
        self._handles.take_planned()
        self._policy.take_over(planned.begun_tick)
        self._saved_tensors.due_tick = self._policy.due_tick
        self._end_planned()

    def take_over_all(self, *, are_kept: bool) -> None:
        """Have the machine track all storages of which saves were only logged.

        Args:
            are_kept: whether the extension keeps saved tensors until their storages move.
        """
        if are_kept:
            self._handles.take_planned()
            self._handles.find_new()
        else:
            self._handles.take_all()
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
                if saved is not None:
                    self._executor.stay(saved, why)
