"""Writes to storages that autograd has saved, or that a replay would read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_state import StepState


class WriteGuard:
    """Keeps replays and copies right when an op writes to a tensor."""

    def __init__(self, state: StepState, lock: Any, executor: ActionExecutor) -> None:
        self._state = state
        self._lock = lock
        self._executor = executor

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """Compute each storage that is to be computed from the present contents of a tensor. Leaves the plan.

        Room for these storages is made before the op writes.
        """
        saved = self._state.storages.find(tensor)
        if saved is not None and saved.readers:
            with self._lock:
                if self._state.phase.follows_plan:
                    self._state.saved_tensors.stop("an op writes to what a replay would read")
                self.settle(list(saved.readers))

    def written(self, tensor: torch.Tensor) -> None:
        """Give up the copy and the recording of a tensor's storage. Autograd then finds what was written, as usual."""
        saved = self._state.storages.find(tensor)
        if saved is None or not saved.views:
            return
        with self._lock:
            if saved.copy is not None:
                self._executor.wait(saved)
                self._executor.discard_copy(saved)
            home = tensor.untyped_storage()
            if saved.find_storage() is not home:
                with Hidden():
                    saved.release()  # contents that came back while the program held the storage itself
                saved.storage = home
            saved.may_move = False
            self._state.machine.refuse(saved.id)
            self._executor.forget_recording(saved)

    def settle(self, storages: Iterable[SavedStorage]) -> None:
        """Compute dropped storages while that can be done, and offload them."""
        actions = self._state.machine.evict([saved.id for saved in storages if saved.recording is not None])
        if actions:
            self._executor.perform(actions)
