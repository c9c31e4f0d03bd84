"""Events of a running step, the input of the residency machine.

Never modified, but not frozen: that would double the time to construct one, and a step has thousands.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageSaved:
    """Autograd saved a tensor of this storage."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageNeeded:
    """Autograd unpacks a tensor of this storage, which must be on the device once the actions are done."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageFreed:
    """Autograd released its last save of this storage."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageRestored:
    """A storage is back on the device because another one is recomputed from it."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class PressureRaised:
    """The next allocation exceeds the limit by `nbytes`. `storage` is always -1."""

    nbytes: int
    tick: int
    storage: int = -1


Event = StorageSaved | StorageNeeded | StorageFreed | StorageRestored | PressureRaised
