"""Uses of a storage: the ticks at which it has to be on the device."""

from __future__ import annotations

import dataclasses
import enum


class UseKind(enum.Enum):
    """Reason why a storage has to be on the device.

    Traces of today say when autograd saves and needs storages. The other kinds are for storages that live across steps:
    parameters, gradients and optimizer state.
    """

    SAVE = "save"
    """Autograd saves the storage, which the op before has just made or read."""
    NEED = "need"
    """Autograd asks for the saved storage."""
    OP = "op"
    """One op reads or writes the storage."""
    MODULE = "module"
    """The forward or backward pass of a module runs, which owns the storage."""
    OPTIMIZER = "optimizer"
    """The optimizer's step reads or writes the storage."""


@dataclasses.dataclass(frozen=True, slots=True)
class StorageUse:
    """One use of a storage."""

    tick: int
    storage: int
    kind: UseKind
