"""What will be needed last leaves first, going by the step before; without one, as `delta`.

A storage that leaves is missed for as long as it is not needed: min(recompute, swap) / (bytes x events until then).
What was offloaded comes back in the order in which it will be needed, while there is room, and copies begin before the
budget is reached.

Source: next uses by position within an iteration are what vDNN, Capuchin and TENSILE plan with; the score is DELTA's,
with the future in the place of the past. L. A. Belady, "A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal 5, 1966: what is needed last is what to miss.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elbowroom.residency.online import Online


class Policy(Online):
    """min(recompute, swap) / (bytes x events until the next use, or since the last)."""

    is_early = True

    def rate(self, storage: int) -> float:
        facts = self.facts
        events = self.habits.next_use(storage)
        absent = self.idle_seconds(storage) if events is None else events
        weight = facts.nbytes(storage) * absent
        return min(facts.replay_seconds(storage), facts.swap_seconds(storage)) / weight if weight > 0 else math.inf

    def list_next(self, away: Iterable[int]) -> Iterable[int]:
        found = [(events, storage) for storage in away if (events := self.habits.next_use(storage)) is not None]
        return [storage for _, storage in sorted(found)] or away
