"""PlainStepCheck: whether a step in which everything is kept may run unwatched."""

from __future__ import annotations

from elbowroom.hooks.ledger import Ledger
from elbowroom.job import Job
from elbowroom.metering import Metering
from elbowroom.plan_cache import PlanCache
from elbowroom.plan_cache_entry import PlanCacheEntry
from elbowroom.running_step import may_attach_later
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.update_groups import count_temporaries

AMPLE = 2
"""Steps of any kind run unwatched while there is room for so many times the growth of the largest one so far."""

MOST_SETS = 64
"""Sets of trained parameters that are remembered. A program that trains more of them has its steps watched."""


class PlainStepCheck:
    """Tells whether the next step may run unwatched.

    Args:
        job: its parameters may be frozen and unfrozen between steps.
        cache: of the room's plans.
        ledger: counts the bytes of the room.
        metering: knows the growth of the steps so far.
        pager: knows the model state that is away, which such a step would bring back.
    """

    def __init__(self, job: Job, cache: PlanCache, ledger: Ledger, metering: Metering, pager: StatePager) -> None:
        self._job = job
        self._cache = cache
        self._ledger = ledger
        self._metering = metering
        self._pager = pager
        self._watched: set[tuple[int, ...]] = set()  # parameters that were trained in watched steps, by their ids

    def note_watched(self) -> None:
        """Note that a step has been watched from its beginning."""
        if len(self._watched) == MOST_SETS:
            self._watched.clear()
        self._watched.add(self._job.name_trained())

    def fits(self, entry: PlanCacheEntry) -> bool:
        """Return True if a plain step fits beside what the job holds now (new gradients, for example)."""
        if self._job.config.always_watch or not entry.is_seen or self._job.name_trained() not in self._watched:
            return False
        is_steady = entry.is_peak_known and not self._cache.varies
        return (is_steady and self._has_room(entry.expect_growth())) or self.has_ample_room(entry)

    def has_ample_room(self, entry: PlanCacheEntry) -> bool:
        """Return True if even a step that is much larger than the largest one so far fits, of whatever kind it is."""
        growth_bytes = max(self._metering.largest_growth_bytes, entry.expect_growth())
        return self._has_room(AMPLE * growth_bytes) and may_attach_later(self._ledger)

    def needs_groups(self, entry: PlanCacheEntry) -> bool:
        """Return True if a plain step may have no room for an update of all parameters at once.

        Steps of this kind were captured while optimizers updated a few at a time.
        """
        if not entry.planned.trace.updates:
            return False
        return not self._has_room(entry.expect_growth() + count_temporaries(self._job.optimizers))

    def _has_room(self, nbytes: int) -> bool:
        return self._ledger.has_room(nbytes + self._pager.count_away(), self._cache.lease.device_bytes)
