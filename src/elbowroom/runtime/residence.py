"""A saved storage as the runtime holds it, and the handles that autograd holds instead of its tensors."""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from elbowroom.errors import InternalError
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared

if TYPE_CHECKING:
    from elbowroom.runtime.copies import Copy
    from elbowroom.runtime.engine import Engine


_SharingVersions = torch._C._SetExcludeDispatchKeyGuard
"""Aliases share a version counter by a layer that is left out where a dispatch mode sees an op."""


class Geometry(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """The geometry of a strided tensor."""
        # Straight to the tuple: this is done for each argument and result of a recorded op.
        return tuple.__new__(cls, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor that lies like this in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)


def check_version(witness: torch.Tensor, shape: Sequence[int], expected: int) -> None:
    """Refuse what was modified in place since it was saved. With any hooks active PyTorch does not check this itself.

    Raises:
        RuntimeError: in PyTorch's own words.
    """
    if witness._version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{witness.dtype} tensor of shape {list(shape)} is at version {witness._version}; expected version "
            f"{expected} instead"
        )


class SavedView:
    """One saved tensor of a storage.

    Attributes:
        tensor: shares the saved tensor's version counter for as long as it is claimed; its bytes only while
            `geometry` is None.
        geometry: how it lay in its storage, once that has been let go.
    """

    __slots__ = ("geometry", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.geometry: Geometry | None = None

    def let_go(self) -> None:
        """Keep the geometry and the version counter, and drop the storage."""
        if self.geometry is None:
            self.geometry = Geometry.of(self.tensor)
            # Assigning to `data` exchanges the storage and leaves the version counter as it is. The tensor itself may
            # be in autograd's hands.
            with _SharingVersions(torch._C.DispatchKey.ADInplaceOrView, False):
                self.tensor = self.tensor.detach()
            self.tensor.data = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)


NOBODY: Set[Residence] = frozenset()
"""The readers of most."""

NO_VIEWS: dict[int, SavedView] = {}
"""Of a storage that was never saved; nobody writes to it."""


class Residence:
    """One storage of one step.

    Args:
        record: the extension's, which knows what the step's ops did with the storage.

    Attributes:
        views: every saved tensor of it, by the index of its save. Nothing else of ours holds the storage while they do.
        storage: what came back from a reload or a replay, or what a replay reads; None otherwise.
        ghost: the storage that was let go last, for as long as the program still holds it.
        copy: its contents in the tier below, if it was ever offloaded.
        recording: how it is computed again, while it is dropped.
        reads: what that starts from.
        may_move: whether it may leave the device; None until somebody asks.
        readers: dropped storages whose replay reads this one.
    """

    __slots__ = (
        *("__weakref__", "copy", "ghost", "may_move", "readers", "reads", "record", "recording"),
        *("storage", "views"),
    )

    def __init__(self, record: Any) -> None:
        self.record = record
        self.views = NO_VIEWS
        self.storage: torch.UntypedStorage | None = None
        self.ghost: weakref.ref[torch.UntypedStorage] | None = None
        self.copy: Copy | None = None
        self.recording: Any = None
        self.reads: tuple[Residence, ...] = ()
        self.readers: Set[Residence] = NOBODY
        self.may_move: bool | None = None

    @property
    def id(self) -> int:
        """The storage's id in the trace, or a number of the step's own where there is none; -1 until it is saved."""
        return int(self.record.id)

    @id.setter  # noqa: A003
    def id(self, value: int) -> None:
        """Set it."""
        self.record.id = value

    @property
    def nbytes(self) -> int:
        """Its size."""
        return int(self.record.nbytes)

    @property
    def version(self) -> int:
        """A number that grows when an op writes to it."""
        return int(self.record.version)

    @property
    def is_staying(self) -> bool:
        """True of a parameter, a buffer, and what else the room knows to outlive the step."""
        return bool(self.record.is_staying)

    def add_view(self, index: int, tensor: torch.Tensor) -> None:
        """A tensor of it was saved. Few storages of a step ever are."""
        if self.views is NO_VIEWS:
            self.views = {}
        self.views[index] = SavedView(tensor)
        self.record.views, self.record.is_guarded = len(self.views), True

    def discard_view(self, index: int) -> None:
        """Autograd has given up a saved tensor of it."""
        self.views.pop(index, None)
        self.record.views = len(self.views)

    def add_reader(self, reader: Residence) -> None:
        """A storage was dropped whose replay reads this one. Few have any."""
        if not isinstance(self.readers, set):
            self.readers = set()
        self.readers.add(reader)
        self.record.is_guarded = True

    def discard_reader(self, reader: Residence) -> None:
        """It is no longer dropped."""
        if isinstance(self.readers, set):
            self.readers.discard(reader)

    def find_storage(self) -> torch.UntypedStorage | None:
        """The storage on the device, if we hold it."""
        if self.storage is not None:
            return self.storage
        for view in self.views.values():
            if view.geometry is None:
                return view.tensor.untyped_storage()
        return None

    def find_ghost(self) -> torch.UntypedStorage | None:
        """The storage that was let go, if the program holds it still.

        Without us autograd would find just that, whatever became of it.
        """
        return None if self.ghost is None else self.ghost()

    def revive(self) -> bool:
        """Take back what was let go if the program holds it still."""
        alive = self.find_ghost()
        self.storage = self.storage if alive is None else alive
        return alive is not None

    def is_exposed(self) -> bool:
        """Whether others may write to it unseen, whoever holds it now."""
        storage = self.find_storage() or self.find_ghost()
        return storage is not None and is_shared(storage)

    def view(self, index: int) -> torch.Tensor:
        """A saved tensor; its storage is on the device."""
        saved = self.views[index]
        if saved.geometry is None:
            return saved.tensor
        if self.storage is None:
            raise InternalError(f"storage {self.id} is needed but not on the device")
        with Hidden():
            return saved.geometry.view(self.storage)

    def let_go(self) -> None:
        """Drop every reference of ours to the storage."""
        storage = self.find_storage()
        if storage is not None:
            self.ghost = weakref.ref(storage)
        for view in self.views.values():
            view.let_go()
        self.storage = None


class Handle:
    """Stands for a saved tensor that may move, and tells the engine when autograd gives that up.

    Attributes:
        engine: of the step.
        index: counts the step's saves.
        residence: of the tensor's storage; None if that stays as it is.
        version: of the tensor when it was saved.
    """

    __slots__ = ("engine", "index", "residence", "version")

    def __init__(self, engine: Engine, index: int, residence: Residence | None, version: int) -> None:
        self.engine, self.index, self.residence, self.version = engine, index, residence, version

    def __del__(self) -> None:
        self.engine.retire(self.index, self.residence)
