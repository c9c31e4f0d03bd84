"""Display names of modules, storages and ops."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elbowroom.ir.trace import PERSISTENT_ROLES, Role, Storage

OUTSIDE = "outside of the step"
"""Label of what exists throughout a step and belongs to none of its tensors."""

HELD = "held from the last step"
"""Label of what exists before a step and is freed in it."""

_PLURALS = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
}


def name_module(path: str) -> str:
    """Return the display name of a module path."""
    return path or "the model itself"


def name_kind(path: str) -> str:
    """Return the path with every number replaced by "*": "transformer.h.*.mlp"."""
    return re.sub("[0-9]+", "*", name_module(path))


def name_group(storage: Storage) -> str:
    """Return the group of storages of the same role and origin: "parameters", "h.*.mlp (relu)"."""
    if storage.label in (OUTSIDE, HELD):
        return "other memory of the program"
    if (plural := _PLURALS.get(storage.role)) is not None:
        return plural
    op = shorten(storage.label)
    if storage.module is None:
        return f"{storage.role} of {op}" + (f" ({storage.line})" if storage.line else "")
    what = f"{op}, temporary" if storage.role is Role.TEMPORARY else op
    return f"{name_kind(storage.module)} ({what})"


def name_storages(storages: Sequence[Storage]) -> str:
    """Name storages of one group; use the full module path if they share it."""
    group, module = name_group(storages[0]), storages[0].module
    if module and "*" in group and all(each.module == module for each in storages):
        return module + group[group.index(" (") :]
    return group


def name_storage(storage: Storage) -> str:
    """Return the label of one storage: the name of a parameter, or the short name of the op that made it."""
    return storage.label if storage.role in PERSISTENT_ROLES else shorten(storage.label)


def shorten(name: str) -> str:
    """Return an op's name without its namespace and overload: "aten.add_.Tensor" becomes "add_"."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name
