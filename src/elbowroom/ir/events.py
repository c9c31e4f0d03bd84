"""Events: what happens to a running step, as told to the residency machine."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class StorageSaved:
    """Autograd put a tensor of this storage aside."""

    storage: int
    tick: int


@dataclasses.dataclass(frozen=True, slots=True)
class StorageNeeded:
    """Autograd asks for a tensor of this storage; it must be on the device when the actions are done."""

    storage: int
    tick: int


@dataclasses.dataclass(frozen=True, slots=True)
class StorageFreed:
    """Nobody can ask for this storage again."""

    storage: int
    tick: int


@dataclasses.dataclass(frozen=True, slots=True)
class StorageRestored:
    """A storage is on the device again for the sake of another one, which is computed from it."""

    storage: int
    tick: int


@dataclasses.dataclass(frozen=True, slots=True)
class PressureRaised:
    """What comes next needs more room than there is, by so many bytes. `storage` is that of none, -1."""

    nbytes: int
    tick: int
    storage: int = -1


Event = StorageSaved | StorageNeeded | StorageFreed | StorageRestored | PressureRaised
