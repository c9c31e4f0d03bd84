"""Finds the Python objects that a step can change: those reachable through closures, globals, attributes and items."""

from __future__ import annotations

import functools
import logging
import pathlib
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from elbowroom.errors import TraceError
from elbowroom.tracing.holders import (
    CellHolder,
    ClassHolder,
    DictHolder,
    Holder,
    ListHolder,
    NamesHolder,
    find_attribute,
    list_slots,
    remember_contents,
)
from elbowroom.tracing.iterators import StandIn, is_iterator

MOST_OBJECTS = 500_000
"""Limit on the traversal, which takes a second or two."""

_ATOMS = frozenset(
    (
        *(int, float, complex, bool, str, bytes, range, slice, type(None), type(...), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format),
    )
)
_OPAQUE = (
    *(types.ModuleType, types.CodeType, types.FrameType, weakref.ref),
    *(logging.Logger, logging.Handler, threading.Thread),
)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_WRAPPED = ("__func__", "__self__", "__wrapped__", "func", "args", "keywords", "fget", "fset")

_OWN = str(pathlib.Path(__file__).parents[1])
_PYTHON = sysconfig.get_paths()["stdlib"]


class Reach:
    """Snapshot of all objects reachable from `roots`.

    Raises:
        TraceError: there are too many objects, or an iterator sits where it cannot be replaced.

    Attributes:
        stand_ins: proxies that replace iterators from `guard` to `put_back`, by id of the iterator.

    Cost: some microseconds per object.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that ids stay unique
        self._holders: list[Holder] = []
        self._contents: list[Callable[[], None]] = []
        self.stand_ins: dict[int, StandIn] = {}
        pending = deque(roots)
        while pending:
            value = pending.popleft()
            if type(value) in _ATOMS or id(value) in self._seen or isinstance(value, _OPAQUE):
                continue
            if len(self._seen) >= MOST_OBJECTS:
                raise TraceError(f"it can reach more than {MOST_OBJECTS} Python objects, too many to restore")
            self._seen[id(value)] = value
            pending.extend(self._open(value))

    def guard(self) -> None:
        """Replace every iterator by a proxy that refuses to advance it."""
        for holder in self._holders:
            for key, value in holder.list_held():
                if is_iterator(value):
                    holder.replace(key, self.stand_ins.setdefault(id(value), StandIn(value)))

    def put_back(self) -> None:
        """Restore the snapshot."""
        for each in self.stand_ins.values():
            each.is_over = True
        for holder in self._holders:
            holder.put_back()
        for put_back in self._contents:
            put_back()

    def _open(self, value: Any) -> list[Any]:
        """Take a snapshot of one object. Return the objects that it refers to."""
        if (put_back := remember_contents(value)) is not None:
            self._contents.append(put_back)
        found: list[Any] = []
        for holder in _list_holders(value):
            self._holders.append(holder)
            # Iterators are not traversed: their proxies yield no items.
            found += [held for _, held in holder.list_held() if type(held) not in _ATOMS and not is_iterator(held)]
        if isinstance(value, dict):
            found += [key for key in value if type(key) not in _ATOMS]
        elif isinstance(value, (tuple, set, frozenset)) and type(value) is not torch.Size:
            found += _refuse_iterators(value)
        elif isinstance(value, types.FunctionType):
            found += [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            _refuse_iterators(value.__defaults__ or ())
        elif isinstance(value, _BOUND):
            found.append(value.__self__)
        elif isinstance(value, torch.Tensor):
            return found
        if callable(value) or isinstance(value, (property, staticmethod, classmethod)):
            found += [held for name in _WRAPPED if (held := find_attribute(value, name)) is not None]
        if not isinstance(value, type) and not _is_library(type(value).__module__):
            found.append(type(value))
        return found


def _list_holders(value: Any) -> list[Holder]:
    holders: list[Holder] = []
    if isinstance(value, type):
        if not _is_library(value.__module__):
            holders.append(ClassHolder(value))
        return holders
    if isinstance(value, dict):
        holders.append(DictHolder(value))
    elif isinstance(value, (list, deque)):
        holders.append(ListHolder(value))
    elif isinstance(value, types.CellType):
        holders.append(CellHolder(value))
    elif isinstance(value, types.FunctionType) and not _is_library(value.__module__):
        holders += _list_globals(value.__globals__, _list_names(value.__code__), set())
    attributes = _find_attributes(value)
    if attributes is not None:
        holders.append(DictHolder(attributes))
    if (slots := list_slots(value)) and not isinstance(value, (torch.Tensor, types.FunctionType)):
        holders.append(NamesHolder(value, slots))
    return holders


def _list_globals(table: dict[str, Any], names: frozenset[str], known: set[int]) -> list[Holder]:
    """Return holders for the globals that a function uses, in its module and in the user's modules that it names."""
    known.add(id(table))
    holders: list[Holder] = [NamesHolder(table, [name for name in names if not name.startswith("__")])]
    for name in names:
        value = table.get(name)
        if isinstance(value, types.ModuleType) and not _is_library(value.__name__) and id(vars(value)) not in known:
            holders += _list_globals(vars(value), names, known)
    return holders


@functools.cache
def _list_names(code: types.CodeType) -> frozenset[str]:
    inner = [_list_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def _find_attributes(value: Any) -> dict[str, Any] | None:
    found = find_attribute(value, "__dict__")
    return found if isinstance(found, dict) else None


def _refuse_iterators(values: Iterable[Any]) -> list[Any]:
    found = list(values)
    for each in found:
        if is_iterator(each):
            raise TraceError(f"a {type(each).__name__} is in a tuple or a default, so it could not be restored")
    return found


@functools.cache
def _is_library(name: str | None) -> bool:
    """Return True for a module of Python, of an installed package, or of Elbowroom: its globals are left alone."""
    if name is None or name in ("builtins", "torch"):
        return True
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or not isinstance(file, str):
        return name in sys.builtin_module_names
    return file.startswith((_OWN, _PYTHON)) or "site-packages" in file or "dist-packages" in file
