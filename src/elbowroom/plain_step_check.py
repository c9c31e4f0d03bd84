"""PlainStepCheck: whether a step in which everything is kept may run unwatched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elbowroom.hooks.input_guard import Inputs
from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.unused_state import list_unused_state
from elbowroom.job import Job
from elbowroom.kinds_by_inputs import KindsByInputs
from elbowroom.metering import Metering
from elbowroom.plan_cache import PlanCache
from elbowroom.plan_cache_entry import PlanCacheEntry, Source
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
        self._kinds = KindsByInputs()
        self._watched: set[tuple[int, ...]] = set()  # parameters that were trained in watched steps, by their ids

    def note_watched(self) -> None:
        """Note that a step has been watched from its beginning."""
        if len(self._watched) == MOST_SETS:
            self._watched.clear()
        self._watched.add(self._job.name_trained())

    def knows_trained(self) -> bool:
        """Return True if a step has been watched in which the optimizers trained the parameters that they train now."""
        return self._job.name_trained() in self._watched

    def fits(self, entry: PlanCacheEntry) -> bool:
        """Return True if a plain step fits beside what the job holds now (new gradients, for example)."""
        if self._job.config.always_watch or not entry.is_seen:
            return False
        is_steady = entry.is_peak_known and self._cache.has_recurred and not self._cache.varies
        return (is_steady and self._has_room(entry.expect_growth())) or self.has_ample_room(entry)

    def list_told(self) -> Sequence[PlanCacheEntry]:
        """Return all known kinds of step if the inputs of the model will tell which of them the next one is.

        All of them fit. None are returned if a plan counts on unused state to be away, or on moves before the model is
        called.
        """
        entries = tuple(self._cache.entries)
        if self._job.config.always_watch or self._cache.knows_few or len(entries) < 2:
            return ()
        live_bytes = self._ledger.live_bytes + self._pager.count_away()
        if not self._kinds.tell_all(entries) or not all(self._may_be_told(each, live_bytes) for each in entries):
            return ()
        moves_state = any(each.planned.candidate.state_schedule is not None for each in entries)
        if moves_state and any(each.ops_before_call != 0 for each in entries):
            return ()  # state has to come back, and to leave, for what runs before the call
        # One that needs a plan gets its runner when the model is called.
        return entries if entries[0].planned.is_plain or may_attach_later(self._ledger) else ()

    def _may_be_told(self, entry: PlanCacheEntry, live_bytes: int) -> bool:
        """Tell whether a step of a kind can begin without a runner. `live_bytes`: before it, what is away included."""
        if not (entry.is_seen and entry.is_peak_known) or entry.is_short or entry.source is Source.DOUBTED:
            return False
        planned = entry.planned
        if planned.is_plain:
            return self._has_room(entry.expect_growth())
        if entry.ops_before_call is None or list_unused_state(planned.trace):
            return False
        return planned.count_spare_bytes(self._cache.lease.device_bytes, live_bytes) >= 0

    def note_miss(self, calls: Counter[Inputs]) -> None:
        """Note that a step with these calls of the model was of no known kind."""
        self._kinds.note_miss(calls, self._cache.entries)

    def distrust(self, calls: Counter[Inputs]) -> None:
        """Note that a step with these calls of the model was refused memory, as it began without a runner."""
        self._kinds.distrust(calls)

    def has_ample_room(self, entry: PlanCacheEntry) -> bool:
        """Return True if even a step that is much larger than the largest one so far fits, of whatever kind it is."""
        growth_bytes = max(self._metering.largest_growth_bytes, entry.expect_growth())
        return self._has_room(AMPLE * growth_bytes) and may_attach_later(self._ledger)

    def needs_groups(self, entry: PlanCacheEntry | None) -> bool:
        """Return True if a step may have no room for an update of all parameters at once. `entry`: the expected kind.

        What steps are known to take may be that of updates of a few at a time, as in captured steps.
        """
        growth_bytes = max(self._metering.largest_growth_bytes, 0 if entry is None else entry.expect_growth())
        temporary_bytes = count_temporaries(self._job.optimizers)
        return temporary_bytes > 0 and not self._has_room(growth_bytes + temporary_bytes)

    def _has_room(self, nbytes: int) -> bool:
        return self._ledger.has_room(nbytes + self._pager.count_away(), self._cache.lease.device_bytes)
