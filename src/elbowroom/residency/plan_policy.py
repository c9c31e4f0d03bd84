"""Carries out a Plan: each move at the first save or need at or after its tick."""

from __future__ import annotations

from collections.abc import Iterable

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import Event, StorageNeeded, StorageSaved
from elbowroom.ir.plan import Choice, Plan
from elbowroom.residency.machine import Drop, Intent

NEVER = 1 << 60
"""Later than every tick."""

# Order within one tick: free memory before reloading.
_COPIES, _RELEASES, _RELOADS = range(3)


class Policy:
    """The moves of a plan, in order of tick.

    Args:
        plan: the plan to carry out.
        since: follow the plan from this tick on; gaps that end by then are skipped.
    """

    def __init__(self, plan: Plan, *, since: int = -1) -> None:
        moves: list[tuple[int, int, int, Intent]] = []
        # If the next gap releases the storage in the tick that ends this one, the need itself reloads it.
        given_up = {(decision.storage, decision.release) for decision in plan.decisions}
        for decision in plan.decisions:
            storage = decision.storage
            if decision.back <= since:
                continue
            if decision.choice is Choice.OFFLOAD:
                moves.append((decision.leave, _COPIES, storage, Offload(storage)))
                moves.append((decision.release, _RELEASES, storage, Release(storage)))
                if (storage, decision.back) not in given_up or decision.back == decision.release:
                    moves.append((decision.back, _RELOADS, storage, Reload(storage)))
            elif decision.choice is Choice.RECOMPUTE:
                moves.append((decision.leave, _RELEASES, storage, Drop(storage, decision.segment)))
        moves.sort(key=lambda move: move[:3])
        self._ticks = [move[0] for move in moves]
        self._moves = [move[3] for move in moves]
        self._next = 0

    @property
    def due_tick(self) -> int:
        """Tick of the next move: earlier events may be withheld from the policy."""
        return NEVER if self._next == len(self._ticks) else self._ticks[self._next]

    def decide(self, event: Event) -> Iterable[Intent]:
        if not isinstance(event, StorageSaved | StorageNeeded):
            return ()
        if self._next == len(self._ticks) or self._ticks[self._next] > event.tick:
            return ()
        begin = self._next
        while self._next < len(self._ticks) and self._ticks[self._next] <= event.tick:
            self._next += 1
        return self._moves[begin : self._next]
