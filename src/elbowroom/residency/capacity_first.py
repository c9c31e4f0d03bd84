"""Whatever may leave leaves as it is saved, and comes back on need.

The least memory any policy can reach, whatever the program does next; used while a step is being captured and after a
step has left its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elbowroom.ir.actions import Offload, Release
from elbowroom.ir.events import Event, PressureRaised, StorageNeeded, StorageSaved
from elbowroom.residency.machine import Intent


class Policy:
    """Offload at once, release at once; after a need, release again when the program moves on.

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
            # Its copy below is clean, so this moves nothing. Autograd holds what it is still working on.
            intents.append(Release(self._used))
            self._used = None
        if not self._movable(event.storage):
            return intents
        if isinstance(event, StorageSaved):
            intents += (Offload(event.storage), Release(event.storage))
        else:
            self._used = event.storage
        return intents
