"""Finds the modules that a function may run, without running it."""

from __future__ import annotations

import dis
import functools
import itertools
from collections.abc import Iterable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

MOST_VALUES = 2000
"""An optimizer's state may have more."""

MOST_STEPS = 6
"""From a function to a module: through closures, globals, arguments, attributes, and the items of containers."""


def find_modules(values: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the modules that are reached from these values: functions, their arguments, containers.

    Runs no code of the program: objects may load their items or attributes as they are asked for.
    """
    found: dict[int, torch.nn.Module] = {}
    seen: dict[int, Any] = {}
    level = list(values)
    for _ in range(MOST_STEPS):
        inner: list[Any] = []
        for value in itertools.islice(level, max(0, MOST_VALUES - len(seen))):
            if id(value) in seen:
                continue
            seen[id(value)] = value
            if issubclass(type(value), torch.nn.Module):
                found[id(value)] = value
            else:
                inner += itertools.islice(_list_parts(value), MOST_VALUES)
        level = inner
    return list(found.values())


def _list_parts(value: Any) -> Iterable[Any]:
    """Return what a value refers to: of a function what it runs, of another object its items or attributes."""
    kind = type(value)
    if kind is MethodType:
        return [value.__self__, value.__func__]
    if kind is functools.partial:
        return [value.func, *value.args, *value.keywords.values()]
    if kind is FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__.get(name) for name in _list_globals(value.__code__)]
        return [*cells, *named, value.__dict__.get("_torchdynamo_orig_callable")]
    for container, iterate in ((dict, dict.values), (list, list.__iter__), (tuple, tuple.__iter__)):
        if issubclass(kind, container):
            return iterate(value)
    if issubclass(kind, (torch.Tensor, type, ModuleType)):
        return []
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property in its place
        return []
    return dict.values(attributes) if type(attributes) is dict else []


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@functools.lru_cache(maxsize=256)
def _list_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code reads."""
    return tuple({each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
