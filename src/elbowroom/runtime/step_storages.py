"""Storages of one step, by tensor and by id."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch

from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.storage_ids import get_any_storage
from elbowroom.native import library
from elbowroom.ops.op_info import describe_op
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.slicing.registry import list_rules


def _describe(name: str, overload: str) -> dict[str, Any]:
    facts = describe_op(name, overload)
    return {**facts, "is_sliceable": facts["name"] in list_rules()}


@functools.cache
def load_native() -> ModuleType:
    """Return the C++ extension, initialized for watching steps."""
    native = library.load()
    native.learn(_describe, SavedStorage)
    return native


class StepStorages:
    """Storages of one step.

    Attributes:
        table: the extension's table of storage records; thread-safe.
        by_id: storages that autograd has saved and that may move.
        alignment_bytes: block size granularity of the allocator.
        min_bytes: smaller storages stay on the device, unless a plan moves them.
    """

    def __init__(self, environment: StepEnvironment) -> None:
        self.table = load_native().StorageTable(environment.ledger.scope)
        self.by_id: dict[int, SavedStorage] = {}
        self._list_residents = environment.list_residents
        self._device = str(environment.device)
        self._are_marked = False
        self.min_bytes = environment.min_bytes
        self.alignment_bytes = environment.profile.alignment_bytes

    def find(self, tensor: torch.Tensor) -> SavedStorage | None:
        """Return the storage of a tensor; None if the step has no record of it."""
        storage = get_any_storage(tensor)
        found: SavedStorage | None = None if storage is None else self.table.find(storage)
        return found

    def mark_persistent(self) -> None:
        """Mark the storages that outlive the step."""
        self.table.mark_staying(self._list_residents(), self._device)
        self._are_marked = True

    def may_move(self, storage: int) -> bool:
        """Tell whether a storage may leave the device without a plan that says so."""
        saved = self.by_id.get(storage)
        if saved is None or saved.nbytes < self.min_bytes:
            return False
        if saved.may_move is None:
            if not self._are_marked:  # in a step that follows its plan, marking is deferred to here
                self.mark_persistent()
            home = saved.find_storage()
            # If others can write to the storage, autograd must find what they have written.
            saved.may_move = not saved.is_persistent and (home is None or not is_shared(home))
        return saved.may_move

    def round_up(self, nbytes: int) -> int:
        """Return the bytes of the block that an allocation of `nbytes` takes."""
        return -(-nbytes // self.alignment_bytes) * self.alignment_bytes
