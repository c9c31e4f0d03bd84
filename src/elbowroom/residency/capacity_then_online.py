"""Has every storage leave as soon as it may, and an online policy evict what stays, if the tier below has no room."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elbowroom.ir.actions import Release
from elbowroom.ir.events import Event, PressureRaised, StorageSaved
from elbowroom.residency import capacity_first
from elbowroom.residency.machine import Intent
from elbowroom.residency.online import Online


class Policy:
    """Offloads everything, and under pressure calls an online policy, which drops what cannot be offloaded.

    Args:
        online: observes all events and moves.
        movable: whether a storage may leave.
    """

    def __init__(self, online: Online, movable: Callable[[int], bool]) -> None:
        self._online = online
        self._first = capacity_first.Policy(movable)

    def decide(self, event: Event) -> Iterable[Intent]:
        """Return the intents to carry out after `event`."""
        is_pressure = isinstance(event, PressureRaised)
        if not is_pressure:
            self._online.watch(event)
        intents = [each for each in self._first.decide(event) if self._may_leave(each, event)]
        if is_pressure and not intents:
            return self._online.decide(event)
        for intent in intents:
            self._online.learn(intent)
        return intents

    def _may_leave(self, intent: Intent, event: Event) -> bool:
        """Tell whether an intent is possible: a storage that was needed before may have no copy to be released to."""
        if not isinstance(intent, Release) or (isinstance(event, StorageSaved) and intent.storage == event.storage):
            return True
        context = self._online.context
        return not context.may_move(intent.storage) or context.copy_out_seconds(intent.storage) == 0
