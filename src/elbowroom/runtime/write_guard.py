"""Handles writes to storages that autograd has saved, or that a replay would read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch

from elbowroom.errors import SavedTensorLost
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import guard_exposures
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_moves import StepMoves
from elbowroom.runtime.step_state import StepState

logger = logging.getLogger(__name__)

LOST = "weights that fully_shard had freed, or tensors that another thread has written to"


class WriteGuard:
    """Keeps replays and copies correct when an op, or code outside PyTorch, writes to a tensor.

    Args:
        state: of the step.
        lock: held while storages move.
        executor: moves storages.
        handles, moves: of the step.
    """

    def __init__(
        self, state: StepState, lock: Any, executor: ActionExecutor, handles: SaveHandles, moves: StepMoves
    ) -> None:
        self._state = state
        self._lock = lock
        self._executor = executor
        self._handles = handles
        self._moves = moves
        guard_exposures(self)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Recompute each dropped storage whose replay reads a tensor, before an op writes to it. Leaves the plan.

        Memory for these storages is freed before the op writes.
        """
        saved = self._find(self._state.storages.find(tensor))
        if saved is not None:
            self._settle_readers(saved, tensor.untyped_storage(), "an op writes to a tensor that a replay reads")

    def written(self, tensor: torch.Tensor) -> None:
        """Discard the copy and the recording of a tensor's storage, so that autograd finds what was written."""
        saved = self._state.storages.find(tensor)
        if saved is not None:
            self._keep(saved, tensor.untyped_storage())

    def expose(self, storage: torch.UntypedStorage) -> None:
        """Expect unnoticed writes to a storage: recompute what depends on its current contents, and keep it."""
        saved = self._find(self._state.storages.table.find(storage))
        if saved is not None:
            self._settle_readers(saved, storage, "the program exposes a tensor that a replay reads")
            self._keep(saved, storage)

    def _find(self, saved: SavedStorage | None) -> SavedStorage | None:
        """Return a storage as the machine has it."""
        if saved is not None and self._state.saved_tensors.planned.holds(saved.record.id):
            with self._lock:
                self._moves.take_over()
        return saved

    def _settle_readers(self, saved: SavedStorage, home: torch.UntypedStorage, why: str) -> None:
        """Recompute the dropped storages whose replay reads a storage. Leaves the plan.

        Those that take weights which are not gathered now get a copy of the storage instead.
        """
        if saved.readers:
            with self._lock:
                if self._state.phase.follows_plan:
                    self._state.saved_tensors.stop(why)
                waiting = self._settle(list(saved.readers))
                if waiting:
                    with Hidden():
                        copied = home.clone()
                for reader in waiting:
                    copies = [each.record for each in reader.inputs]
                    if not reader.recording.is_intact(self._state.storages.table, copies):
                        continue  # another thread has written before: the contents are not those that its ops read
                    reader.inputs = {**reader.inputs, saved: copied}
                    reader.reads = tuple(each for each in reader.reads if each is not saved)
                    saved.discard_reader(reader)

    def _keep(self, saved: SavedStorage, home: torch.UntypedStorage) -> None:
        """Keep a saved storage on the device, so that autograd finds what is written to it."""
        if not saved.is_saved():
            return
        with self._lock:
            if saved.copy is not None:
                self._executor.wait(saved)
                self._executor.discard_copy(saved)
            if saved.find_storage() is not home:
                self._handles.take(saved)
                saved.release()  # a reloaded duplicate of a storage that the program still held
                saved.storage = home
            saved.may_move = False
            self._state.machine.refuse(saved.id)
            self._executor.forget_recording(saved)

    def settle(self, storages: Iterable[SavedStorage]) -> None:
        """Recompute dropped storages while their inputs are intact, and offload them. Give up what takes weights that
        are not gathered now: a backward pass that needs it raises an error."""
        lost = self._settle(storages)
        for saved in lost:
            self._executor.forget_recording(saved)
        if lost:
            self._state.given_up = f"it takes {LOST}."
            logger.warning("what the step leaves behind was given up, as it takes %s", LOST)

    def _settle(self, storages: Iterable[SavedStorage]) -> list[SavedStorage]:
        """Recompute dropped storages and offload them. Return those that take weights that are not gathered now."""
        lost = []
        for saved in storages:
            if saved.recording is not None:
                try:
                    self._executor.perform(self._state.machine.evict([saved.id]))
                except SavedTensorLost:
                    lost.append(saved)
        return lost
