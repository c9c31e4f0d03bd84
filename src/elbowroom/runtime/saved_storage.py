"""Storages of the tensors that autograd has saved."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Set
from typing import Any

import torch

from elbowroom.errors import InternalError
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.native import library
from elbowroom.runtime.copies import Copy

SavedView = Any
"""One saved tensor: an object of the extension. Its `tensor` shares the saved tensor's version counter, and also its
bytes until `is_released`."""


NO_READERS: Set[SavedStorage] = frozenset()
"""Shared empty set: no replay reads most storages."""

NO_VIEWS: dict[int, SavedView] = {}
"""Shared empty dict of storages that were never saved. Never written to."""


NO_COPIES: Mapping[SavedStorage, torch.UntypedStorage] = {}
"""Shared empty mapping: hardly any input of a replay changes before it. Never written to."""


class SavedStorage:
    """One storage of one step, with the tensors that autograd has saved of it and the means to bring it back.

    Args:
        record: the extension's record of what the step's ops did with the storage.

    Attributes:
        views: saved tensors by the index of their save, but for those that the extension keeps. While they share its
            bytes, we hold no other reference to the storage.
        storage: storage that came back from a reload or a replay, or that a replay reads; else None.
        released_ref: weak reference to the storage that was released last, which the program may still hold.
        copy: copy in the tier below, if the storage was ever offloaded.
        recording: recording that recomputes the storage, while it is dropped.
        reads: storages that `recording` starts from.
        inputs: copies of those that have changed since.
        may_move: whether the storage may leave the device; None until first asked.
        readers: dropped storages whose replay reads this one.
    """

    __slots__ = (
        *("__weakref__", "copy", "inputs", "may_move", "readers", "reads", "record", "recording", "released_ref"),
        *("storage", "views"),
    )

    def __init__(self, record: Any) -> None:
        self.record = record
        self.views = NO_VIEWS
        self.storage: torch.UntypedStorage | None = None
        self.released_ref: weakref.ref[torch.UntypedStorage] | None = None
        self.copy: Copy | None = None
        self.recording: Any = None
        self.reads: tuple[SavedStorage, ...] = ()
        self.inputs = NO_COPIES
        self.readers: Set[SavedStorage] = NO_READERS
        self.may_move: bool | None = None

    @property
    def id(self) -> int:
        """Id of the storage in the trace that the step follows, else a number of this step; -1 until it is saved."""
        return int(self.record.id)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.record.nbytes)

    @property
    def is_persistent(self) -> bool:
        """True if the storage outlives the step, as parameters and buffers do."""
        return bool(self.record.is_staying)

    def add_view(self, index: int, tensor: torch.Tensor) -> None:
        """Keep a tensor that autograd saves. `index`: index of the save."""
        self.keep_view(index, library.load().SavedView(tensor))  # the tensor would keep the graph alive in a cycle

    def keep_view(self, index: int, view: SavedView) -> None:
        """Keep a view of a tensor that autograd saves. `index`: index of the save."""
        if self.views is NO_VIEWS:
            self.views = {}
        self.views[index] = view
        self.record.views = len(self.views)
        self.record.is_guarded = self.record.is_handled = True

    def take_over(
        self, copy: Copy | None, storage: torch.UntypedStorage | None, released: torch.UntypedStorage | None
    ) -> None:
        """Set where the storage is, as the extension has moved it: see `copy`, `storage` and `released_ref`."""
        self.copy = copy
        self.storage = storage
        self.released_ref = None if released is None else weakref.ref(released)

    def is_saved(self) -> bool:
        """Tell whether autograd has saved a tensor of it, and not released it."""
        return bool(self.views or self.record.kept_count)

    def count_references(self) -> int:
        """Return how many saved tensors share its bytes."""
        return int(self.record.kept_count) + sum(not view.is_released for view in tuple(self.views.values()))

    def discard_view(self, index: int) -> None:
        """Remove a saved tensor that autograd has released."""
        self.views.pop(index, None)
        self.record.views = len(self.views)

    def add_reader(self, reader: SavedStorage) -> None:
        """Note a dropped storage whose replay reads this one."""
        if not isinstance(self.readers, set):
            self.readers = set()
        self.readers.add(reader)
        self.record.is_guarded = True

    def discard_reader(self, reader: SavedStorage) -> None:
        """Remove a reader that is no longer dropped."""
        if isinstance(self.readers, set):
            self.readers.discard(reader)

    def forget_recording(self) -> tuple[SavedStorage, ...]:
        """Forget how it is computed again. Return what its replay would read."""
        reads = self.reads
        self.recording = None
        self.reads = ()
        self.inputs = NO_COPIES
        return reads

    def find_storage(self) -> torch.UntypedStorage | None:
        """Return the storage on the device; None if we do not hold it."""
        if self.storage is not None:
            return self.storage
        if self.record.kept_count:
            kept: torch.UntypedStorage | None = self.record.storage
            return kept
        for view in tuple(self.views.values()):  # another thread may add one
            if not view.is_released:
                storage: torch.UntypedStorage = view.storage
                return storage
        return None

    def find_released(self) -> torch.UntypedStorage | None:
        """Return the storage that was released last; None if it was freed.

        Without Elbowroom autograd would use this storage, including what the program has written to it since.
        """
        return None if self.released_ref is None else self.released_ref()

    def revive(self) -> bool:
        """Take back the storage that was released last. Returns whether the program still holds it."""
        released = None if self.released_ref is None else self.released_ref()
        if released is None:
            return False
        self.storage = released
        return True

    def is_exposed(self) -> bool:
        """Tell whether NumPy or another process may write to the storage."""
        storage = self.find_storage()
        if storage is None:  # one without bytes, as of a weight that FSDP has freed, is false
            storage = self.find_released()
        return storage is not None and is_shared(storage)

    def view(self, index: int) -> torch.Tensor:
        """Return a saved tensor. Its storage must be on the device."""
        saved = self.views[index]
        if not saved.is_released:
            tensor: torch.Tensor = saved.tensor
            return tensor
        if self.storage is None:
            raise InternalError(f"storage {self.id} is needed but not on the device")
        made: torch.Tensor = saved.make(self.storage)
        return made

    def release(self) -> None:
        """Drop all of our references to the storage. The version counters of the saved tensors stay.

        None of them may be kept by the extension (`SaveHandles.take`).
        """
        home = self.find_storage()
        if home is not None:
            self.released_ref = weakref.ref(home)
        for view in self.views.values():
            view.release()
        self.storage = None
