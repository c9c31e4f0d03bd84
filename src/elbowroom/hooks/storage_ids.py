"""Values by storage, and access to the storages of tensors of any class.

PyTorch keeps one Python object for a storage as long as the storage lives, so a weak reference to that object is a weak
reference to the storage. Addresses are reused, so a value is found by the identity of that object.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, strided
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.native import library

Item = TypeVar("Item")

PLAIN_TENSORS = frozenset((Tensor, Parameter))
"""Classes of almost all tensors: a look-up here is faster than `isinstance`."""

_NO_DISPATCH = Tensor.__torch_dispatch__
"""`__torch_dispatch__` of classes whose tensors own their bytes."""


class _Entry(weakref.ref[torch.UntypedStorage], Generic[Item]):
    """Weak reference that holds its key and value: one object per storage, since every step creates thousands."""

    __slots__ = ("item", "key", "owner")

    item: Item
    key: int
    owner: Identities[Item]


def _forget(entry: _Entry[Item]) -> None:
    owner = entry.owner
    if owner._items.get(entry.key) is entry:
        del owner._items[entry.key]
    if owner._on_death is not None:
        owner._on_death(entry.item)


@functools.cache
def _make_callback() -> Callable[[_Entry[Any]], None]:
    callback: Callable[[_Entry[Any]], None] = library.load().ShieldedFunction(_forget)
    return callback


class Identities(Generic[Item]):
    """Mapping from living storages to values.

    Args:
        on_death: called with the value when its storage is freed. May run at any moment, so it must be quick.
    """

    def __init__(self, on_death: Callable[[Item], None] | None = None) -> None:
        self._items: dict[int, _Entry[Item]] = {}
        self._on_death = on_death

    def find(self, storage: torch.UntypedStorage) -> Item | None:
        """Return the value of a storage, or None."""
        entry = self._items.get(id(storage))
        return entry.item if entry is not None and entry() is storage else None

    def put(self, storage: torch.UntypedStorage, item: Item) -> None:
        """Set the value of a storage."""
        entry: _Entry[Item] = _Entry(storage, _make_callback())
        entry.item = item
        entry.key = id(storage)
        entry.owner = self
        self._items[entry.key] = entry

    def close(self) -> None:
        """Remove all values; `on_death` is not called any more."""
        self._items.clear()
        self._on_death = None


get_address = torch.UntypedStorage.data_ptr
"""Returns the address of a storage's memory. The method itself may be wrapped later (see `exposed_memory.py`)."""


def get_any_storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor of any class, or None if it has none."""
    if tensor._is_zerotensor():  # its storage has a size but no bytes
        return None
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Tell whether a tensor is on a device, or on any of its type if the device has no index."""
    found = tensor.device
    return found == device or (found.type == device.type and (device.index is None or device.type == "cpu"))


def get_plain_storage(tensor: torch.Tensor, *, fake: bool = False) -> torch.UntypedStorage | None:
    """Return the storage of a plain strided tensor; None for sparse, quantised, nested, wrapped and symbolic ones.

    Also None if the bytes alone are not the value (conjugate and negative bits, subclasses of the user's).

    Args:
        fake: whether fake tensors count as plain.
    """
    if type(tensor) not in PLAIN_TENSORS:
        if isinstance(tensor, FakeTensor):  # a Parameter may be one
            if not fake:
                return None
        elif not isinstance(tensor, Parameter) or type(tensor).__torch_dispatch__ is not _NO_DISPATCH:
            return None
    if tensor.layout is not strided or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    return get_any_storage(tensor)


_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")

_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}


def list_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the component tensors of a sparse or nested tensor, hidden from modes; none of other tensors."""
    with Hidden():
        if tensor.is_nested and type(tensor) in PLAIN_TENSORS:
            return [tensor.values()]
        return [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]


def get_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor that stands for a parameter, which under `functional_call` need not be a leaf."""
    return tensor.grad if tensor.is_leaf else None  # PyTorch warns of the others


def unwrap(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that own a tensor's bytes: the inner tensors of a wrapper subclass (such as DTensor), else the
    tensor itself. Empty if a wrapper class does not expose its inner tensors."""
    if type(tensor).__torch_dispatch__ is _NO_DISPATCH or isinstance(tensor, FakeTensor):
        return [tensor]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        wrapped = [getattr(tensor, name) for name in names]
        return [part for each in wrapped if isinstance(each, Tensor) for part in unwrap(each)]
    return [tensor] if _has_bytes(tensor) else []


def _has_bytes(tensor: torch.Tensor) -> bool:
    storage = get_any_storage(tensor)
    try:
        return storage is not None and get_address(storage) is not None
    except RuntimeError:
        return False
