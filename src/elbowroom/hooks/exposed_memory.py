"""Notifies rooms when the program accesses a tensor's memory without an op.

Memory that is away is brought back first. Memory that the program shows to NumPy, DLPack or another process may be
written to from then on without PyTorch noticing.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from enum import Enum
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

    def hold_storage(self, storage: torch.UntypedStorage, *, is_written: bool, is_lasting: bool) -> object:
        """Bring the bytes of a storage back if they are away, and keep them in memory.

        Args:
            is_written: whether the program may write to them.
            is_lasting: whether they stay until the next step begins; otherwise as long as the result lives.

        Returns:
            None if the storage never leaves.
        """
        ...


class Access(Enum):
    """Accesses of a method to the memory of the tensors or storages that it is given."""

    READ = "reads, until it returns"
    WRITE = "writes, until it returns"
    ADDRESS = "tells the address"


_is_in_shared_memory = torch.UntypedStorage.is_shared
"""The method itself, which is wrapped below."""

_shown: Identities[bool] = Identities()
_told: Identities[bool] = Identities()

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

_SAVING_SCRIPTS = "save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile"
"""Methods that write a module of TorchScript with its parameters and buffers."""

_ACCESSING: tuple[tuple[Any, str, Access], ...] = (
    (torch.Tensor, "tolist", Access.READ),
    *((torch.Tensor, name, Access.READ) for name in ("__float__", "__index__", "__complex__")),  # torch.tensor([x])
    (torch.Tensor, "apply_", Access.WRITE),
    (torch.Tensor, "map_", Access.WRITE),
    (torch.Tensor, "map2_", Access.WRITE),
    (torch.Tensor, "data_ptr", Access.ADDRESS),
    (torch.Tensor, "const_data_ptr", Access.ADDRESS),
    (torch.UntypedStorage, "data_ptr", Access.ADDRESS),
    (torch.UntypedStorage, "is_shared", Access.READ),
    (torch.UntypedStorage, "__getitem__", Access.READ),
    (torch.UntypedStorage, "__setitem__", Access.WRITE),
    (torch.UntypedStorage, "_byteswap", Access.WRITE),
    (torch.UntypedStorage, "_get_filename", Access.READ),
    (torch.UntypedStorage, "_set_from_file", Access.WRITE),
    (torch.UntypedStorage, "_write_file", Access.READ),
    (torch.UntypedStorage, "copy_", Access.WRITE),
    (torch.UntypedStorage, "fill_", Access.WRITE),
    (torch.UntypedStorage, "resize_", Access.WRITE),
    (torch._C.PyTorchFileWriter, "write_record", Access.READ),  # torch.save writes each storage by it
    *((torch._C.ScriptModule, name, Access.READ) for name in _SAVING_SCRIPTS),
)
"""Methods that access memory without an op."""

_COMPARING = {
    ("torch.serialization", "persistent_id"),
    ("torch._tensor", "__deepcopy__"),
    ("torch._tensor", "_reduce_ex_internal"),
    ("torch.nn.modules.rnn", "flatten_parameters"),
}
"""Functions of PyTorch that only compare addresses, with each other and with 0."""


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Tell whether NumPy, another library or another process may write to a storage."""
    for find in tuple(_restorers):
        if (restorer := find()) is not None and restorer.is_away(storage):
            return False  # what is shared stays; and PyTorch aborts the process if it is asked about such a storage
    is_foreign = storage.device.type == "cpu" and (not storage.resizable() or _is_in_shared_memory(storage))
    return is_foreign or _shown.find(storage) is not None


def is_address_known(storage: torch.UntypedStorage) -> bool:
    """Tell whether the program was told the address of a storage's memory, where it may write."""
    return _told.find(storage) is not None


def note_exposures() -> None:
    """Wrap PyTorch's methods that expose memory, so that exposed storages are noted. Permanent."""
    for owner, name in _EXPOSING:
        if not hasattr(getattr(owner, name), "tells_guards"):
            setattr(owner, name, _wrap(getattr(owner, name)))
    if not hasattr(torch.UntypedStorage.__getitem__, "tells_guards"):
        torch.UntypedStorage.__getitem__ = _wrap_slicing(torch.UntypedStorage.__getitem__)  # type: ignore[method-assign]


def expose(storage: torch.UntypedStorage) -> None:
    """Note that others may write to a storage, unless that is known."""
    if _shown.find(storage) is None:
        _tell_guards(storage)


def _tell_guards(storage: torch.UntypedStorage) -> None:
    _shown.put(storage, True)
    for guard in [each() for each in tuple(_guards)]:
        if guard is not None:
            guard.expose(storage)


def guard_exposures(guard: ExposureGuard) -> None:
    """Call `guard.expose` for each storage that is exposed, for as long as the guard is alive."""
    _guards.append(weakref.ref(guard, _guards.remove))


def restore_before_access(restorer: Restorer) -> None:
    """Call `restorer.hold_storage` before memory is accessed without an op, for as long as the restorer is alive.

    The methods that do so are wrapped once and for good.
    """
    if all(find() is not restorer for find in _restorers):
        _restorers.append(weakref.ref(restorer, _restorers.remove))
    for owner, name, access in _ACCESSING:
        method = getattr(owner, name, None)  # PyTorch 2.11 lacks some
        if method is not None and not hasattr(method, "restores"):
            setattr(owner, name, _restore_first(method, access))


def _restore_first(method: Callable[..., Any], access: Access) -> Callable[..., Any]:
    @functools.wraps(method)
    def restore_and_call(*args: Any, **options: Any) -> Any:
        if not _restorers:
            return method(*args, **options)
        caller = sys._getframe(1)
        if access is Access.ADDRESS and (caller.f_globals.get("__name__"), caller.f_code.co_name) in _COMPARING:
            return _identify(method, *args)
        uses = _hold(args, access)
        if access is Access.ADDRESS:
            for storage in filter(None, map(_find_storage, args)):
                _told.put(storage, True)
        result = method(*args, **options)
        del uses
        return result

    restore_and_call.restores = True  # type: ignore[attr-defined]
    return restore_and_call


def _identify(method: Callable[..., Any], accessed: Any) -> Any:
    """Return the address that `method` tells; of memory that may leave, a number that stays the same."""
    storage = _find_storage(accessed)
    if storage is None or not _hold((storage,), Access.READ):
        return method(accessed)
    return storage._cdata  # an address as well, at which nothing else is


def _hold(accessed: Iterable[Any], access: Access | None) -> list[object]:
    """Bring back the storages among some objects, or of some tensors. They stay as long as the result lives.

    Args:
        access: to them; None if the program may access them from now on.
    """
    uses = []
    for storage in filter(None, map(_find_storage, _list_accessed(accessed))):
        for restorer in filter(None, [find() for find in tuple(_restorers)]):
            is_lasting = access is Access.ADDRESS
            uses.append(restorer.hold_storage(storage, is_written=access is not Access.READ, is_lasting=is_lasting))
    return [each for each in uses if each is not None]


def _list_accessed(accessed: Iterable[Any]) -> Iterable[Any]:
    """List objects, and of modules of TorchScript their parameters and buffers."""
    for each in accessed:
        if isinstance(each, torch._C.ScriptModule):
            module = torch.jit._recursive.wrap_cpp_module(each)
            yield from (*module.parameters(), *module.buffers())
        else:
            yield each


def _find_storage(accessed: Any) -> torch.UntypedStorage | None:
    if isinstance(accessed, torch.Tensor):
        return get_any_storage(accessed)
    return accessed if isinstance(accessed, torch.UntypedStorage) else None


def _wrap(expose: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expose)
    def expose_and_tell(exposed: Any, *args: Any, **options: Any) -> Any:
        uses = _hold((exposed,), None) if _restorers else []
        result = expose(exposed, *args, **options)
        storage = _find_storage(exposed)
        if storage is not None:
            _tell_guards(storage)
        del uses
        return result

    expose_and_tell.tells_guards = True  # type: ignore[attr-defined]
    return expose_and_tell


def _wrap_slicing(get_item: Callable[..., Any]) -> Callable[..., Any]:
    """A slice of a storage is another storage of the same memory."""
    get_slice = _wrap(get_item)

    @functools.wraps(get_slice)
    def get(storage: torch.UntypedStorage, index: Any) -> Any:
        return (get_slice if isinstance(index, slice) else get_item)(storage, index)

    return get
