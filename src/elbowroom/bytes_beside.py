"""Plans a step again when it needs more than was forecast, or when the program has come to hold more beside it than
its plan has room for, or much less."""

from __future__ import annotations

import dataclasses
import logging

from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.digest import digest
from elbowroom.ir.outside import count_outside, set_outside
from elbowroom.job import Job
from elbowroom.plan_cache import PlanCache, list_sizes
from elbowroom.plan_cache_entry import OpBytes, PlanCacheEntry
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.step_state import StepState

logger = logging.getLogger(__name__)

SHORT_STEPS = 2
"""Steps in a row without enough room, after which the step is planned again."""

LEAST_FREED = 0.1
"""Share of the budget that a plan leaves to other memory of the program, and that the program does not use..."""

IDLE_STEPS = 16
"""... in so many steps in a row, after which the step is planned again."""

GROWTH = 0.5
"""What grew goes on growing: a plan leaves room for so much more of the growth, if it can."""

LEAST_GROWTH = 0.01
"""And for at least this share of the budget."""


def count_live(job: Job, ledger: Ledger, pager: StatePager, expected: PlanCacheEntry | None) -> int:
    """Return the bytes before a step, state that is away included, but for what the expected step does not use."""
    live_bytes = ledger.live_bytes + pager.count_away()
    schedule = None if expected is None else expected.planned.candidate.state_schedule
    if schedule is None or not schedule.unused:
        return live_bytes
    return live_bytes - schedule.count_unused(job.list_kept(), job.name_residents)


class BytesBeside:
    """Watches the bytes that exist when planned steps begin, and those that they miss.

    Args:
        cache: of the room's plans.
    """

    def __init__(self, cache: PlanCache) -> None:
        self._cache = cache
        self._entry: PlanCacheEntry | None = None
        self._short_steps = self._idle_steps = self._left_steps = 0
        self._refused_bytes: int | None = None
        self._live_bytes = 0

    def watch(self, entry: PlanCacheEntry, live_bytes: int) -> None:
        """Plan the step that begins again if it has to be. Ranks that agreed on a plan keep it.

        Args:
            live_bytes: of the job and of the rest of the program, model state that is away included.
        """
        self._live_bytes = live_bytes
        if entry.is_agreed:
            return
        if entry is not self._entry:
            self._entry = entry
            self._short_steps = self._idle_steps = self._left_steps = 0
            self._refused_bytes = None
        planned, budget_bytes = entry.planned, self._cache.lease.device_bytes
        base_bytes = live_bytes + entry.excess_bytes
        is_short = planned.count_spare_bytes(budget_bytes, base_bytes) < 0
        self._short_steps = self._short_steps + 1 if is_short else 0
        unused_bytes = min(count_outside(planned.trace), -planned.count_more(base_bytes))
        self._idle_steps = self._idle_steps + 1 if unused_bytes > LEAST_FREED * budget_bytes else 0
        if self._short_steps >= SHORT_STEPS and (self._refused_bytes is None or base_bytes < self._refused_bytes):
            self._short_steps = 0
            more_bytes = int(max(GROWTH * planned.count_more(base_bytes), LEAST_GROWTH * budget_bytes))
            if not self._plan(entry, base_bytes + more_bytes) and not self._plan(entry, base_bytes):
                self._refused_bytes = base_bytes
        elif self._idle_steps == IDLE_STEPS:
            self._idle_steps = 0
            self._plan(entry, base_bytes)

    def note_followed(self, entry: PlanCacheEntry, peak_bytes: int) -> None:
        """Note that a step that `watch` was called for has followed the plan to its end.

        Args:
            peak_bytes: of the step; 0 if not metered.
        """
        self._left_steps = 0
        excess_bytes = peak_bytes - self._cache.lease.device_bytes
        if excess_bytes <= 0:
            entry.is_proven = True
        else:
            self._learn(entry, excess_bytes)

    def note_left(self, entry: PlanCacheEntry, state: StepState) -> bool:
        """Note that a step that `watch` was called for has left the plan. Plan it again if it needs more than forecast.

        Returns:
            Whether the next step may be expected to follow the plan of the entry: this one was of its kind, and lacked
            memory for the first time, is planned again, or follows the plan from now on as far as there is room.
        """
        name_kind = self._cache.name_kind
        is_alike = name_kind(state.saved_tensors.sizes) == name_kind(list_sizes(entry.planned.trace))
        if not state.left_for_room or not is_alike:
            return False
        self._left_steps += 1
        if entry.op_bytes in (OpBytes.ESTIMATED, OpBytes.DOUBTED) and not entry.is_agreed:
            entry.op_bytes = OpBytes.DOUBTED
            return True
        if self._left_steps < SHORT_STEPS:  # a single step may hold something that the others do not
            return True
        self._left_steps = 0
        if entry.is_agreed or state.missing_bytes <= 0:
            return False
        entry.is_short = not self._learn(entry, state.missing_bytes)
        return True

    def _learn(self, entry: PlanCacheEntry, missing_bytes: int) -> bool:
        """Plan a step again that needs more than was forecast. Return whether a plan fits.

        Args:
            missing_bytes: of the budget.
        """
        if entry.is_agreed:
            return False
        planned, budget_bytes = entry.planned, self._cache.lease.device_bytes
        excess_bytes = missing_bytes + max(0, planned.count_spare_bytes(budget_bytes, self._live_bytes))
        more_bytes = int(max(GROWTH * missing_bytes, LEAST_GROWTH * budget_bytes))
        base_bytes = self._live_bytes + entry.excess_bytes + excess_bytes
        is_planned = self._plan(entry, base_bytes + more_bytes) or self._plan(entry, base_bytes)
        if is_planned:
            entry.excess_bytes += excess_bytes
        return is_planned

    def _plan(self, entry: PlanCacheEntry, base_bytes: int) -> bool:
        """Plan a step beside so many bytes. Return whether a plan fits; otherwise the former one stays."""
        trace = set_outside(entry.planned.trace, base_bytes)
        costs = dataclasses.replace(entry.planned.costs, trace_digest=digest(trace))
        is_planned = self._cache.plan_again(entry, trace, costs)
        if is_planned:
            logger.info("%s: planned again beside %d bytes", trace.name, base_bytes)
        return is_planned
