"""Notifies running steps when the program exposes a tensor's memory to NumPy, DLPack or another process.

From then on that memory may be written to without PyTorch noticing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from elbowroom.hooks.storage_ids import Identities, get_any_storage


class ExposureGuard(Protocol):
    """Keeps copies and replays correct for storages that others may write to."""

    def expose(self, storage: torch.UntypedStorage) -> None:
        """Expect unnoticed writes to a storage from now on."""
        ...


class Restorer(Protocol):
    """Brings back bytes that are away."""

    def is_away(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the bytes of a storage are away."""
        ...

    def restore_storage(self, storage: torch.UntypedStorage) -> None:
        """Bring the bytes of a storage back, if they are away."""
        ...


_shown: Identities[bool] = Identities()

_guards: list[weakref.ref[ExposureGuard]] = []
_restorers: list[weakref.ref[Restorer]] = []

_EXPOSING: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "numpy"),  # np.asarray calls it
    (torch.Tensor, "__dlpack__"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
    (torch.UntypedStorage, "_share_fd_cpu_"),  # share_memory_ and multiprocessing call one of these
    (torch.UntypedStorage, "_share_filename_cpu_"),
)

_READING: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "data_ptr"),
    (torch.Tensor, "tolist"),
    (torch.UntypedStorage, "data_ptr"),
    (torch.UntypedStorage, "is_shared"),
    (torch.UntypedStorage, "_write_file"),
    (torch._C.PyTorchFileWriter, "write_record"),  # torch.save writes each storage by it
)
"""Methods that access memory without an op, and are done with it when they return."""


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Tell whether NumPy, another library or another process may write to a storage."""
    for find in tuple(_restorers):
        if (restorer := find()) is not None and restorer.is_away(storage):
            return False  # what is shared stays; and PyTorch aborts the process if it is asked about such a storage
    is_foreign = storage.device.type == "cpu" and (not storage.resizable() or storage.is_shared())
    return is_foreign or _shown.find(storage) is not None


def note_exposures() -> None:
    """Wrap PyTorch's methods that expose memory, so that exposed storages are noted. Permanent."""
    for owner, name in _EXPOSING:
        if not hasattr(getattr(owner, name), "tells_guards"):
            setattr(owner, name, _wrap(getattr(owner, name)))


def guard_exposures(guard: ExposureGuard) -> None:
    """Call `guard.expose` for each storage that is exposed, for as long as the guard is alive."""
    _guards.append(weakref.ref(guard, _guards.remove))


def restore_before_access(restorer: Restorer) -> None:
    """Call `restorer.restore_storage` before memory is accessed without an op, for as long as the restorer is alive.

    The methods that do so are wrapped once and for good.
    """
    _restorers.append(weakref.ref(restorer, _restorers.remove))
    for owner, name in _READING:
        read = getattr(owner, name)
        if not hasattr(read, "restores"):
            setattr(owner, name, _restore_first(read))


def _restore_first(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def restore_and_read(accessed: Any, *args: Any, **options: Any) -> Any:
        if _restorers:
            _restore((accessed, *args))
        return read(accessed, *args, **options)

    restore_and_read.restores = True  # type: ignore[attr-defined]
    return restore_and_read


def _restore(accessed: Iterable[Any]) -> None:
    """Bring back the storages among some objects."""
    for each in accessed:
        storage = get_any_storage(each) if isinstance(each, torch.Tensor) else each
        if isinstance(storage, torch.UntypedStorage):
            for restorer in [find() for find in tuple(_restorers)]:
                if restorer is not None:
                    restorer.restore_storage(storage)


def _wrap(expose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expose)
    def expose_and_tell(exposed: Any, *args: Any, **options: Any) -> Any:
        if _restorers:
            _restore((exposed, *args))
        result = expose(exposed, *args, **options)
        storage = get_any_storage(exposed) if isinstance(exposed, torch.Tensor) else exposed
        if storage is not None:
            _shown.put(storage, True)
            for guard in [each() for each in tuple(_guards)]:
                if guard is not None:
                    guard.expose(storage)
        return result

    expose_and_tell.tells_guards = True  # type: ignore[attr-defined]
    return expose_and_tell
