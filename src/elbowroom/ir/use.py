"""Uses of a storage: the ticks at which it has to be on the device."""

from __future__ import annotations

import dataclasses
import enum


class UseKind(enum.Enum):
    """Reason why a storage has to be on the device.

    Saved storages have the kinds SAVE and NEED (`Trace.uses`); the model's state has OP and OPTIMIZER
    (`Trace.state_uses`).
    """

    SAVE = "save"
    """Autograd saves the storage, which the preceding op has made or read."""
    NEED = "need"
    """Autograd unpacks the saved storage."""
    OP = "op"
    """One op reads or writes the storage."""
    MODULE = "module"
    """The forward or backward pass of the owning module runs."""
    OPTIMIZER = "optimizer"
    """One op of the optimizer's step reads or writes the storage."""


@dataclasses.dataclass(frozen=True, slots=True)
class StorageUse:
    """One use of a storage."""

    tick: int
    storage: int
    kind: UseKind
