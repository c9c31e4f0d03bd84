"""Offloads every storage that may leave as soon as it is saved, and reloads it on demand.

This is the lowest memory use that a policy can reach without knowledge of the program; used while a step is captured,
and after a step has diverged from its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elbowroom.ir.actions import Offload, Release
from elbowroom.ir.events import Event, PressureRaised, StorageNeeded, StorageSaved
from elbowroom.residency.machine import Intent


class Policy:
    """Offloads and releases at once; after a need, releases again at the next event.

    Args:
        movable: whether a storage may leave.
    """

    def __init__(self, movable: Callable[[int], bool]) -> None:
        self._movable = movable
        self._used: int | None = None

    def decide(self, event: Event) -> Iterable[Intent]:
        if isinstance(event, PressureRaised):
            used, self._used = self._used, None
            return () if used is None else (Release(used),)
        if not isinstance(event, StorageSaved | StorageNeeded):
            return ()
        intents: list[Intent] = []
        if self._used is not None and self._used != event.storage:
            # Its copy below is clean, so this copies nothing. Autograd keeps what it still uses alive.
            intents.append(Release(self._used))
            self._used = None
        if not self._movable(event.storage):
            return intents
        if isinstance(event, StorageSaved):
            intents += (Offload(event.storage), Release(event.storage))
        else:
            self._used = event.storage
        return intents
