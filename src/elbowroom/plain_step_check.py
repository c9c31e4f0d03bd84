"""PlainStepCheck: whether a step in which everything is kept may run unwatched."""

from __future__ import annotations

from elbowroom.hooks.ledger import Ledger
from elbowroom.metering import Metering
from elbowroom.plan_cache import PlanCache
from elbowroom.plan_cache_entry import PlanCacheEntry
from elbowroom.running_step import may_attach_later
from elbowroom.runtime.state_pager import StatePager

AMPLE = 2
"""Steps of any kind run unwatched while there is room for so many times the growth of the largest one so far."""


class PlainStepCheck:
    """Tells whether the next step may run unwatched.

    Args:
        cache: of the room's plans.
        ledger: counts the bytes of the room.
        metering: knows the growth of the steps so far.
        pager: knows the model state that is away, which such a step would bring back.
        always_watch: whether every step is watched.
    """

    def __init__(
        self, cache: PlanCache, ledger: Ledger, metering: Metering, pager: StatePager, *, always_watch: bool
    ) -> None:
        self._cache = cache
        self._ledger = ledger
        self._metering = metering
        self._pager = pager
        self._always_watch = always_watch

    def fits(self, entry: PlanCacheEntry) -> bool:
        """Return True if a plain step fits beside what the job holds now (new gradients, for example)."""
        if not entry.is_seen or self._always_watch:
            return False
        is_steady = entry.is_peak_known and not self._cache.varies
        return (is_steady and self._has_room(entry.expect_growth())) or self.has_ample_room(entry)

    def has_ample_room(self, entry: PlanCacheEntry) -> bool:
        """Return True if even a step that is much larger than the largest one so far fits, of whatever kind it is."""
        growth_bytes = max(self._metering.largest_growth_bytes, entry.expect_growth())
        return self._has_room(AMPLE * growth_bytes) and may_attach_later(self._ledger)

    def _has_room(self, nbytes: int) -> bool:
        return self._ledger.has_room(nbytes + self._pager.count_away(), self._cache.lease.device_bytes)
