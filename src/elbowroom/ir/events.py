"""Events: what happens to a running step, as told to the residency machine.

Nobody writes to one. To have that enforced would take as long as the rest of making it, and steps have thousands.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageSaved:
    """Autograd put a tensor of this storage aside."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageNeeded:
    """Autograd asks for a tensor of this storage; it must be on the device when the actions are done."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageFreed:
    """Nobody can ask for this storage again."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class StorageRestored:
    """A storage is on the device again for the sake of another one, which is computed from it."""

    storage: int
    tick: int


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class PressureRaised:
    """The next allocation exceeds the limit by `nbytes`. `storage` is always -1."""

    nbytes: int
    tick: int
    storage: int = -1


Event = StorageSaved | StorageNeeded | StorageFreed | StorageRestored | PressureRaised
