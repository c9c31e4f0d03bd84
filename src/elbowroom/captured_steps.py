"""CapturedSteps: plans the steps of a room that were captured, and again once their ops are measured."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from elbowroom.agreed_plans import AgreedPlans, CapturedStep
from elbowroom.capture_schedule import IN_SLICES, NO_PLAN, CaptureSchedule, explain_no_plan
from elbowroom.errors import Infeasible, TraceError
from elbowroom.hooks.input_guard import Inputs
from elbowroom.ir.costs import Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.journal import StepRecord
from elbowroom.ir.trace import Trace
from elbowroom.job import Job
from elbowroom.metering import Metering
from elbowroom.plan_cache import PlanCache, list_sizes
from elbowroom.plan_cache_entry import OpBytes, PlanCacheEntry, Source
from elbowroom.planner_faults import explain_fault
from elbowroom.runtime.sliced_ops import SlicedOps
from elbowroom.runtime.state_pager import StatePager
from elbowroom.tracing.live import LiveCapture
from elbowroom.unused_state_plans import LeavesOut


class CapturedSteps:
    """Plans captured steps.

    Args:
        job, cache, metering: of the room.
        pager, sliced_ops: tell whether steps may run without a plan.
        schedule: of captures.
        agreed: as for `StepModes`.
    """

    def __init__(
        self,
        job: Job,
        cache: PlanCache,
        metering: Metering,
        pager: StatePager,
        sliced_ops: SlicedOps,
        schedule: CaptureSchedule,
        agreed: AgreedPlans | None,
    ) -> None:
        self._job = job
        self._cache = cache
        self._metering = metering
        self._pager, self._sliced_ops = pager, sliced_ops
        self._schedule = schedule
        self._agreed = agreed

    @property
    def is_paging(self) -> bool:
        """True if model state or results of ops have left memory in this room: then a step may run without a plan."""
        return self._pager.is_active or bool(self._sliced_ops.figures.counts)

    def plan(self, trace: Trace, measurements: Measurements | None, *, has_run: bool = False) -> str:
        """Plan a step. Return "", or why the step runs without a plan.

        Args:
            has_run: whether the step has run within the budget, and is not only foreseen.

        Raises:
            Infeasible: it cannot run within the budget.
        """
        cache = self._cache
        trace_digest = digest(trace)
        try:
            may_leave_out = self._job.moves_state and self._agreed is None  # ranks may use different state
            leaves_out = LeavesOut.of(may_leave_out, is_watched=self._pager.is_active)
            cache.add(trace, trace_digest, measurements, leaves_out)
        except Infeasible as error:
            if self._sliced_ops.has_run:
                error.add(IN_SLICES)
            if not (self.is_paging or has_run or cache.entries):
                obstacle = cache.planner.find_obstacle(trace, trace_digest, measurements, cache.lease)
                if obstacle is not None:
                    error.add(obstacle)
                    raise
            if has_run:
                costs = cache.planner.price(trace, trace_digest, measurements)
                cache.unplanned.record(trace, costs, cache.lease.device_bytes)
            self._schedule.reason = NO_PLAN
            return explain_no_plan(error)
        except TraceError as error:
            return explain_fault(error)
        return ""

    def adopt(self, capture: LiveCapture, record: StepRecord, calls: Counter[Inputs]) -> None:
        """Plan a captured step, unless later steps will differ from it.

        Args:
            capture, record: of the step.
            calls: of the model during the step.

        Raises:
            Infeasible: it cannot run within the budget.
        """
        self._schedule.captures += 1
        trace = capture.finish(has_slices=self._sliced_ops.has_run)
        if self._agreed is not None and self._agreed.is_open:
            if self._agreed.is_due:
                measurements = capture.measure(trace, record.seconds, record.stall_seconds)
                self._agreed.captured = CapturedStep(trace, measurements, calls)
            return
        self._cache.record_capture(list_sizes(trace))
        if not capture.is_settled and self._schedule.captures < self._job.config.settling_steps:
            return
        cache, self._schedule.captures = self._cache, 0
        # If other kinds of step are known, this one is planned only once it recurs.
        if cache.entries and (cache.contains(trace) or not cache.record_miss(list_sizes(trace), record)):
            self._schedule.put_off(self._metering.steps - 1)
            return
        if why := self.plan(trace, capture.measure(trace, record.seconds, record.stall_seconds), has_run=True):
            self._schedule.put_off(self._metering.steps - 1, why)
            return
        self._schedule.note_success()
        cache.entries[0].calls, cache.entries[0].ops_before_call = calls, capture.ops_before_call
        cache.entries[0].note_measured(record)
        if self._sliced_ops.has_run:
            cache.entries[0].op_bytes = OpBytes.ESTIMATED

    def note_miss(self, sizes: Sequence[int], record: StepRecord, *, is_whole: bool = True) -> None:
        """Note that a step was of no known kind.

        Args:
            sizes: of what it has saved.
            is_whole: whether it was watched from its beginning.
        """
        cache = self._cache
        if cache.record_miss(sizes, record, self._schedule.capture_seconds):
            is_unlike_any = (
                is_whole and sizes and all(sizes[0] != each.planned.candidate.first_bytes for each in cache.entries)
            )
            self._schedule.note_recurrence(record.step, sizes[0] if is_unlike_any else None)

    def learn(self, entry: PlanCacheEntry, capture: LiveCapture, record: StepRecord, *, is_followed: bool) -> None:
        """Take note of a planned step whose ops were measured.

        Args:
            is_followed: whether it followed the plan of the entry.
        """
        entry.measured_steps += 1
        entry.note_measured(record)
        # Ops of the block beyond the captured step (logging its loss, for example) do not matter.
        trace = entry.planned.trace
        measured = capture.measure(trace, record.seconds, record.stall_seconds) if is_followed else None
        if entry.source is Source.ESTIMATED:
            self._replan(entry, measured, is_followed=is_followed)
        elif measured is None:
            entry.source = Source.MEASURED  # the plan stays
        else:
            self._cache.record_again(entry, measured)

    def learn_bytes(self, entry: PlanCacheEntry, capture: LiveCapture, record: StepRecord) -> None:
        """Plan a step again if its ops, measured in a step that left its plan, take more than was estimated."""
        entry.op_bytes = OpBytes.UNKNOWN if self._sliced_ops.has_run else OpBytes.MEASURED
        planned = entry.planned
        measured = capture.measure(planned.trace, record.seconds, record.stall_seconds)
        if measured is None:
            return
        known = planned.costs.workspace_bytes
        workspace_bytes = tuple(map(max, known, measured.workspace_bytes))
        if workspace_bytes == known:
            return
        costs = dataclasses.replace(planned.costs, workspace_bytes=workspace_bytes)
        try:
            entry.replace(self._cache.plan_step(planned.trace, costs))
        except Infeasible as error:
            self._schedule.reason = NO_PLAN
            self._give_up(entry, explain_no_plan(error))
        except TraceError as error:
            self._give_up(entry, explain_fault(error))

    def _give_up(self, entry: PlanCacheEntry, why: str) -> None:
        self._cache.remove(entry)
        self._schedule.put_off(self._metering.steps - 1, why)

    def _replan(self, entry: PlanCacheEntry, measured: Measurements | None, *, is_followed: bool) -> None:
        """Replan with measured op times, if the observed step matched the planned one to the last op."""
        if measured is None:
            if not is_followed or entry.measured_steps == self._job.config.settling_steps:
                self._cache.remove(entry)  # the real step differs from the fake one: capture it live
            return
        try:
            self._cache.replan(entry, measured)
        except Infeasible as error:  # it ran within the budget, and so may the next one
            self._schedule.reason = NO_PLAN
            why = explain_no_plan(error)
        except TraceError as error:
            why = explain_fault(error)
        else:
            return
        self._give_up(entry, why)
