"""Actions: what the residency machine tells its driver to do, in order."""

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
    """Do not go on before the storage's transfer has ended."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Let go of the device's copy."""

    storage: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """Replay a segment, and hold these of its outputs."""

    segment: int
    outputs: tuple[int, ...]


Action = Offload | Reload | Wait | Release | Recompute
