"""Notifies running steps when the program exposes a tensor's memory to NumPy, DLPack or another process.

From then on that memory may be written to without PyTorch noticing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from elbowroom.hooks.storage_ids import Identities, get_any_storage


class ExposureGuard(Protocol):
    """Keeps copies and replays correct for storages that others may write to."""

    def expose(self, storage: torch.UntypedStorage) -> None:
        """Expect unnoticed writes to a storage from now on."""
        ...


_shown: Identities[bool] = Identities()

_guards: list[weakref.ref[ExposureGuard]] = []

_EXPOSING: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "numpy"),  # np.asarray calls it
    (torch.Tensor, "__dlpack__"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "to_dlpack"),
    (torch.UntypedStorage, "_share_fd_cpu_"),  # share_memory_ and multiprocessing call one of these
    (torch.UntypedStorage, "_share_filename_cpu_"),
)


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Tell whether NumPy, another library or another process may write to a storage."""
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


def _wrap(expose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expose)
    def expose_and_tell(exposed: Any, *args: Any, **options: Any) -> Any:
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
