"""Finds the modules that a function may run, without running it."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

MOST_VALUES = 2000
"""An optimizer's state may have more."""

MOST_STEPS = 6
"""From a function to a module: through closures, globals, arguments, attributes, and the items of containers."""


def find_modules(values: Iterable[Any]) -> list[torch.nn.Module]:
    """Return the modules that are reached from these values: functions, their arguments, containers."""
    found: dict[int, torch.nn.Module] = {}
    seen = set[int]()
    level = list(values)
    for _ in range(MOST_STEPS):
        inner: list[Any] = []
        for value in level[: MOST_VALUES - len(seen)]:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, torch.nn.Module):
                found[id(value)] = value
            else:
                inner += _list_parts(value)
        level = inner
    return list(found.values())


def _list_parts(value: Any) -> list[Any]:
    """Return what a value refers to: of a function what it runs, of another object its items or attributes."""
    if isinstance(value, (torch.Tensor, str, bytes, int, float, complex, type, type(None))):
        return []
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        named = [value.__globals__.get(name) for name in _list_globals(value.__code__)]
        return [*cells, *named, getattr(value, "_torchdynamo_orig_callable", None)]
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if type(value).__module__ in ("builtins", "torch"):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@functools.lru_cache(maxsize=256)
def _list_globals(code: CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code reads."""
    return tuple({each.argval for each in dis.get_instructions(code) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME")})
