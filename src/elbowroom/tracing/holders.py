"""Snapshots of containers whose values a step may replace: attributes, closures, dicts, lists."""

from __future__ import annotations

import array
import collections
import functools
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from types import CellType
from typing import Any, Protocol

import numpy as np
import torch

MOST_ARRAY_BYTES = 16 << 20
"""Larger NumPy arrays are not copied, hence not restored."""

_MISSING = object()


class Holder(Protocol):
    """Container with a snapshot of its values."""

    def list_held(self) -> Iterable[tuple[Any, Any]]:
        """Return the (key, value) pairs of the snapshot."""
        ...

    def replace(self, key: Any, value: Any) -> None:
        """Replace the value under a key."""
        ...

    def put_back(self) -> None:
        """Restore the snapshot, if the contents have changed."""
        ...


class DictHolder:
    """Snapshot of a dict, or of the attributes of an object."""

    def __init__(self, table: dict[Any, Any]) -> None:
        # Bypasses overridden methods of user-defined subclasses.
        self._kind: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
        self._table, self._held = table, list(self._kind.items(table))

    def list_held(self) -> Iterable[tuple[Any, Any]]:
        return self._held

    def replace(self, key: Any, value: Any) -> None:
        self._kind.__setitem__(self._table, key, value)

    def put_back(self) -> None:
        items = self._kind.items(self._table)
        if len(items) != len(self._held) or any(
            old is not new or before is not after for (old, before), (new, after) in zip(self._held, items, strict=True)
        ):
            self._kind.clear(self._table)
            for key, value in self._held:
                self._kind.__setitem__(self._table, key, value)


class ListHolder:
    """Snapshot of a list or a deque."""

    def __init__(self, values: list[Any] | collections.deque[Any]) -> None:
        self._kind: Any = list if isinstance(values, list) else collections.deque
        self._values, self._held = values, list(values)

    def list_held(self) -> Iterable[tuple[Any, Any]]:
        return enumerate(self._held)

    def replace(self, key: Any, value: Any) -> None:
        self._kind.__setitem__(self._values, key, value)

    def put_back(self) -> None:
        if len(self._values) != len(self._held) or any(map(operator.is_not, self._values, self._held)):
            self._kind.clear(self._values)
            self._kind.extend(self._values, self._held)


class NamesHolder:
    """Snapshot of named attributes: globals that a function uses, slots, class attributes.

    Bypasses user-defined access (`__getattr__`, frozen dataclasses).
    """

    def __init__(self, owner: Any, names: Iterable[str]) -> None:
        self._owner = owner
        self._get: Callable[[str], Any] = lambda name: find_attribute(owner, name, _MISSING)
        self._set: Callable[[str, Any], None] = lambda name, value: object.__setattr__(owner, name, value)
        self._delete: Callable[[str], None] = lambda name: object.__delattr__(owner, name)
        if isinstance(owner, dict):
            self._get = lambda name: owner.get(name, _MISSING)
            self._set, self._delete = owner.__setitem__, owner.__delitem__
        elif isinstance(owner, type):
            self._get = lambda name: vars(owner).get(name, _MISSING)
            self._set = lambda name, value: type.__setattr__(owner, name, value)
            self._delete = lambda name: type.__delattr__(owner, name)
        self._held = [(name, self._get(name)) for name in names]

    def list_held(self) -> Iterable[tuple[Any, Any]]:
        return [(name, value) for name, value in self._held if value is not _MISSING]

    def replace(self, key: Any, value: Any) -> None:
        self._set(key, value)

    def put_back(self) -> None:
        for name, value in self._held:
            now = self._get(name)
            if now is not value:
                if value is _MISSING:
                    self._delete(name)
                else:
                    self._set(name, value)


class ClassHolder(NamesHolder):
    """Snapshot of the attributes of a class, dunder names excluded."""

    def __init__(self, owner: type) -> None:
        super().__init__(owner, [name for name in vars(owner) if not name.startswith("__")])
        self._class, self._known = owner, set(vars(owner))

    def put_back(self) -> None:
        super().put_back()
        for name in [name for name in vars(self._class) if name not in self._known and not name.startswith("__")]:
            type.__delattr__(self._class, name)


class CellHolder:
    """Snapshot of a closure cell."""

    def __init__(self, cell: CellType) -> None:
        self._cell, self._held = cell, _read_cell(cell)

    def list_held(self) -> Iterable[tuple[Any, Any]]:
        return [] if self._held is _MISSING else [("", self._held)]

    def replace(self, key: Any, value: Any) -> None:
        self._cell.cell_contents = value

    def put_back(self) -> None:
        if _read_cell(self._cell) is self._held:
            return
        if self._held is _MISSING:
            del self._cell.cell_contents
        else:
            self._cell.cell_contents = self._held


def remember_contents(value: Any) -> Callable[[], None] | None:
    """Return a function that restores the contents of `value` that are not Python objects: array elements, bytes, the
    state of a random generator. None if it has no such contents."""
    if isinstance(value, torch.Tensor):
        return _remember_gradient(value)
    if isinstance(value, set):
        return _remember_set(value)
    if isinstance(value, np.ndarray):
        if not value.flags.writeable or value.nbytes > MOST_ARRAY_BYTES:
            return None
        return _remember_bytes(value, value.copy(), slice(None) if value.ndim else ...)
    if isinstance(value, (bytearray, array.array)):
        return _remember_bytes(value, value[:], slice(None))
    if isinstance(value, torch.Generator):
        return _putting_back(value.get_state, value.set_state)
    if isinstance(value, np.random.RandomState):
        return _putting_back(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        return _putting_back(lambda: bits.state, lambda state: setattr(bits, "state", state))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _putting_back(value.getstate, value.setstate)
    if isinstance(value, functools._lru_cache_wrapper):
        known = value.cache_info()  # drop results computed on fake tensors
        return lambda: value.cache_clear() if value.cache_info().misses != known.misses else None
    return None


def _remember_gradient(tensor: torch.Tensor) -> Callable[[], None] | None:
    if not tensor.is_leaf:
        return None
    gradient, is_required = tensor.grad, tensor.requires_grad

    def put_back() -> None:
        if tensor.requires_grad is not is_required:
            tensor.requires_grad_(is_required)
        if tensor.grad is not gradient:
            tensor.grad = gradient

    return put_back


def _remember_set(values: set[Any]) -> Callable[[], None]:
    held = list(values)

    def put_back() -> None:
        if {id(each) for each in values} != {id(each) for each in held}:
            set.clear(values)
            set.update(values, held)

    return put_back


def _remember_bytes(value: Any, held: Any, all_of_it: Any) -> Callable[[], None]:
    def put_back() -> None:
        value[all_of_it] = held

    return put_back


def _putting_back(read: Callable[[], Any], write: Callable[[Any], object]) -> Callable[[], None]:
    state = read()

    def put_back() -> None:
        write(state)

    return put_back


def _read_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def find_attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return an attribute, bypassing `__getattr__`; `default` if it is missing or a property raises."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a property may raise anything
        return default


def list_slots(value: object) -> Sequence[str]:
    """Return the names of an object's slots, dunder names excluded."""
    slots: list[str] = []
    for each in type(value).__mro__:
        names = vars(each).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            if name.startswith("__") and not name.endswith("__"):  # private: name mangling
                slots.append(f"_{each.__name__.lstrip('_')}{name}")
            elif not name.startswith("__"):
                slots.append(name)
    return slots
