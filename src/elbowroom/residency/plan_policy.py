"""Carries out a Plan: each move at the first save or need at or after its tick."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterable, Sequence

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import Event, StorageNeeded, StorageSaved
from elbowroom.ir.plan import Choice, Plan
from elbowroom.residency.machine import Drop, Intent

NEVER = 1 << 60
"""Later than every tick."""

_ORDER = operator.itemgetter(0, 1, 2)

# Order within one tick: free memory before reloading.
COPIES, RELEASES, RELOADS = range(3)

Move = tuple[int, int, int, Intent]
"""A move of a plan: tick, order within it, storage, and what the machine is asked for."""


def list_moves(plan: Plan, *, since: int = -1) -> list[Move]:
    """Return the moves of a plan in order.

    Args:
        since: leave out gaps that end by this tick.
    """
    moves: list[Move] = []
    # If the next gap releases the storage in the tick that ends this one, the need itself reloads it.
    given_up = {(decision.storage, decision.release) for decision in plan.decisions}
    for decision in plan.decisions:
        storage = decision.storage
        if decision.back <= since:
            continue
        if decision.choice is Choice.OFFLOAD:
            moves.append((decision.leave, COPIES, storage, Offload(storage)))
            moves.append((decision.release, RELEASES, storage, Release(storage)))
            if (storage, decision.back) not in given_up or decision.back == decision.release:
                moves.append((decision.back, RELOADS, storage, Reload(storage)))
        elif decision.choice is Choice.RECOMPUTE:
            moves.append((decision.leave, RELEASES, storage, Drop(storage, decision.segment)))
    moves.sort(key=_ORDER)
    return moves


class Policy:
    """The moves of a plan, in order of tick.

    Args:
        moves: of the plan, in order (`list_moves`).
        since: leave out moves at earlier ticks.
    """

    def __init__(self, moves: Sequence[Move], *, since: int = -1) -> None:
        self._ticks = [move[0] for move in moves]
        self._moves = [move[3] for move in moves]
        self._next = bisect.bisect_left(self._ticks, since)

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
