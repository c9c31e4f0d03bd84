"""Names of storages and ops, for people."""

from __future__ import annotations

from elbowroom.ir.trace import Role, Storage

_PLURALS = {
    Role.PARAMETER: "parameters",
    Role.GRADIENT: "gradients",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.BUFFER: "buffers",
    Role.INPUT: "inputs",
}


def name_group(storage: Storage) -> str:
    """Name the storages that have the role and the origin of this one: "parameters", "activation of relu"."""
    plural = _PLURALS.get(storage.role)
    return plural if plural is not None else f"{storage.role} of {shorten(storage.label)}"


def shorten(name: str) -> str:
    """Return an op's name without its namespace and overload: "aten.add_.Tensor" becomes "add_"."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else name
