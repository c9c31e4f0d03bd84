"""Actions that the residency machine tells its driver to carry out, in order."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """Begin copying a storage to the tier below."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reload:
    """Make room on the device and begin copying a storage back."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the storage's transfer to end."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Free the device's copy."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Replay a segment, and keep the given outputs."""

    segment: int
    outputs: tuple[int, ...]


Action = Offload | Reload | Wait | Release | Recompute
