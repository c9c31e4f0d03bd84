"""Caches the plans of a room's steps, one per recurring kind of step, most recently used first."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from elbowroom.cost.prediction_check import is_off
from elbowroom.cost.recordings import leave_out_replays, smooth_recordings
from elbowroom.errors import Infeasible, TraceError
from elbowroom.hooks.input_guard import Inputs
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.journal import StepRecord
from elbowroom.ir.learned import LearnedStep, LearnedSteps
from elbowroom.ir.lease import Lease
from elbowroom.ir.trace import Trace
from elbowroom.ir.unused_state import leave_out_unused_state, list_unused_state
from elbowroom.plan_cache_entry import PlanCacheEntry, Source
from elbowroom.planned_step import PlannedStep, forecast_plan
from elbowroom.planner_faults import explain_fault, keeping_plan
from elbowroom.planning_times import QUICK, find_level
from elbowroom.step_planner import StepPlanner
from elbowroom.unplanned_steps import UnplannedSteps
from elbowroom.unused_state_plans import LeavesOut, plan_beside_unused

logger = logging.getLogger(__name__)

STEPS_THAT_SET_THE_PACE = 5
"""Number of planned steps whose times correct the forecast of later ones."""

STEPS_MEASURED_AGAIN = 3
"""Number of steps whose op times are measured, and smoothed, if predictions turn out to be wrong."""

MOST_PLANS = 32
"""Capacity of the cache, which evicts the least recently used plan."""

MOST_SEEN = 4096
"""Number of distinct steps without a plan that are remembered, to detect recurrence."""

GAIN = 0.1
"""Share of a step's time that a plan is expected to save beside stalls: the policy recomputes and moves more."""

STEADY = 16
"""Consecutive expected steps after which the next step is assumed to be of the expected kind."""

VARYING = 0.02
"""Share by which plain steps of one kind hold more or less than each other at most."""

RECENT = 16
"""Steps that tell whether kinds recur."""

FEW = 4
"""Recent steps of known kinds below which the next one is expected to be of none."""

FREQUENT = 3
"""Recent steps of one kind from which on more are expected soon."""


class PlanCache:
    """Caches the plans of steps, and detects which steps recur.

    Args:
        lease: limits of the job.
        planner: makes the plans.

    Attributes:
        lease: the current one; `set_budget` replaces it.
        planner: as given.
        entries: most recently used first.
        unplanned: steps that no plan fitted.
        has_recurred: whether any kind of step has recurred. One step tells nothing of the next.
    """

    def __init__(self, lease: Lease, planner: StepPlanner) -> None:
        self.lease = lease
        self.planner = planner
        self.entries: list[PlanCacheEntry] = []
        self._seen: OrderedDict[int, float] = OrderedDict()  # seconds that plans would have saved
        self._steady = STEADY
        self._captured: tuple[int, ...] = ()  # kind of the last captured step
        self.has_recurred = False
        self.unplanned = UnplannedSteps(self._tell_apart)
        self._recent: deque[int | None] = deque(maxlen=RECENT)  # kinds of steps; None for a known one

    @property
    def current(self) -> PlanCacheEntry | None:
        """Entry of the step that is expected next; None if the cache is empty."""
        return self.entries[0] if self.entries else None

    @property
    def varies(self) -> bool:
        """True if recent steps were of several kinds."""
        return self._steady < STEADY

    @property
    def knows_few(self) -> bool:
        """True if hardly any of the recent steps was of a known kind."""
        return len(self._recent) == RECENT and self._recent.count(None) < FEW

    # -- hits and misses -----------------------------------------------------------------------------------------

    def record_capture(self, sizes: Sequence[int]) -> None:
        """Record that a step was captured. `sizes`: as for `record_miss`."""
        former, self._captured = self._captured, self.name_kind(sizes)
        if former == self._captured:
            self.has_recurred = True
        elif former:
            self._steady = 0

    def record_growth(self, entry: PlanCacheEntry, growth_bytes: int) -> None:
        """Record how much a plain step of a kind held beyond what was there before it."""
        if entry.growth_bytes and abs(growth_bytes - entry.growth_bytes) > VARYING * entry.growth_bytes:
            self._steady = 0
        entry.growth_bytes = max(entry.growth_bytes, growth_bytes)

    def record_hit(self, entry: PlanCacheEntry, calls: Counter[Inputs]) -> None:
        """Record that a step was of a known kind. `calls`: of the model during the step."""
        self._recent.append(None)
        entry.calls |= calls
        entry.is_seen = self.has_recurred = True
        self._steady = self._steady + 1 if entry is self.entries[0] else 0
        self.entries.remove(entry)
        self.entries.insert(0, entry)

    def record_miss(self, sizes: Sequence[int], record: StepRecord, capture_seconds: float = 0.0) -> bool:
        """Record that a step was of no known kind. Return True if such steps are worth a plan.

        They are once they recur, and a plan would have saved the time that making one quickly takes; and, unless they
        are frequent, the time that a captured step takes beyond theirs.

        Args:
            sizes: bytes of each saved storage.
            record: of the step.
            capture_seconds: of a captured step; 0 if this one was captured.
        """
        self._steady = 0
        key = hash(self.name_kind(sizes))
        self._recent.append(key)
        former_seconds = self._seen.pop(key, None)
        seconds = (former_seconds or 0.0) + _count_lost_seconds(record)
        self._seen[key] = seconds
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        cost_seconds = self.planner.times.quick_seconds
        if self._recent.count(key) < FREQUENT:
            cost_seconds += max(0.0, capture_seconds - record.seconds)
        return former_seconds is not None and seconds >= cost_seconds

    def find(self, sizes: Sequence[int]) -> PlanCacheEntry | None:
        """Return the entry of steps with these saves, whatever their ops; None if there is none."""
        for each in self.entries:
            trace = each.planned.trace
            if len(trace.saves) == len(sizes) and self.name_kind(list_sizes(trace)) == self.name_kind(sizes):
                return each
        return None

    def improve(self, entry: PlanCacheEntry, record: StepRecord) -> None:
        """Search for a better plan than one that was made quickly, once it may have lost as much time as that takes.

        Args:
            record: of a step that followed the plan.
        """
        times = self.planner.times
        better = times.find_better(entry.planned.plan)
        if better is None or entry.is_short or entry.source is not Source.MEASURED:
            return
        entry.lost_seconds += record.stall_seconds + entry.planned.moving_seconds
        if entry.lost_seconds >= times.expect(better):
            entry.lost_seconds = 0.0
            self.plan_again(entry, entry.planned.trace, entry.planned.costs, first=better)

    def contains(self, trace: Trace) -> bool:
        """Return True if there is a plan for steps with the same saves and ops."""
        return any(self._tell_apart(entry.planned.trace) == self._tell_apart(trace) for entry in self.entries)

    def name_kind(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return what tells kinds of step apart: the bytes of each saved storage, or 0 if it never moves."""
        least_bytes = self.planner.config.min_offload_bytes
        return tuple(each if each >= least_bytes else 0 for each in sizes)

    def _tell_apart(self, trace: Trace) -> tuple[object, ...]:
        names = tuple(op.name for op in trace.ops if op.tick <= trace.needs[-1].tick)
        return self.name_kind(list_sizes(trace)), names

    def remove(self, entry: PlanCacheEntry) -> None:
        """Remove an entry if present, so that the next step of its kind gets a runner."""
        if entry in self.entries:
            self.entries.remove(entry)

    # -- steps learned by another room ------------------------------------------------------------------------------

    def list_learned(self) -> LearnedSteps:
        """Return all kinds of step with their plans, and the op times of this machine."""
        steps = tuple(
            LearnedStep(each.planned.trace, each.planned.costs, each.planned.plan, each.source is not Source.ESTIMATED)
            for each in self.entries
        )
        return LearnedSteps(self.planner.describe(self.lease), steps, self.planner.past.export())

    def adopt_learned(self, learned: LearnedSteps, parameters: Counter[int]) -> None:
        """Add kinds of step that another room has learned. Costs of another machine are estimated anew, and plans for
        other limits or options made anew; a step that no plan fits is left out.

        Args:
            parameters: how many of the model have how many bytes. A step with others is left out.
        """
        is_same_machine = learned.op_times.machine == self.planner.past.machine
        if is_same_machine:
            self.planner.past.add_seconds({each.key: each.seconds for each in learned.op_times.times})
        for step in learned.steps:
            if step.trace.device != self.planner.device.type or self.contains(step.trace):
                continue
            is_same = is_same_machine and learned.options == self.planner.describe(self.lease)
            if not is_same and list_unused_state(step.trace):
                continue  # it leaves out state that may stay now
            if not step.count_parameters() <= parameters:
                logger.info("a step learned before has other parameters, or other shards of them")
                continue
            is_measured = is_same_machine and step.is_measured
            costs = step.costs if is_same_machine else self.planner.price(step.trace, step.costs.trace_digest, None)
            try:
                if is_same:
                    planned = forecast_plan(step.trace, costs, step.plan, self.lease.host_bytes)
                else:
                    planned = self.plan_step(step.trace, costs)
            except Infeasible as error:
                logger.info("a step learned before is not planned: %s", error)
                continue
            source = Source.MEASURED if is_measured else Source.ESTIMATED
            self.entries.append(PlanCacheEntry(planned, source, is_seen=False))
        del self.entries[MOST_PLANS:]

    # -- planning -------------------------------------------------------------------------------------------------

    def add(self, trace: Trace, trace_digest: str, measurements: Measurements | None, leaves_out: LeavesOut) -> None:
        """Plan a step, which becomes the expected one.

        Raises:
            Infeasible: no plan fits the budget.
        """
        costs = self.planner.price(trace, trace_digest, measurements)
        source = Source.ESTIMATED
        if measurements is not None and not self.planner.is_beside_compiler:
            source = Source.MEASURED
            self.planner.past.add(trace, measurements.op_seconds)
        lost_seconds = self._seen.get(hash(self.name_kind(list_sizes(trace))), 0.0)
        is_one_of_many = bool(self.entries) and lost_seconds < self.planner.times.search_seconds
        make = functools.partial(self.plan_step, climbs=not is_one_of_many)
        planned = plan_beside_unused(make, trace, costs, leaves_out, self.lease, self.planner.config.min_offload_bytes)
        self.entries.insert(0, PlanCacheEntry(planned, source, lost_seconds=lost_seconds))
        del self.entries[MOST_PLANS:]

    def adopt_agreed(self, planned: PlannedStep, calls: Counter[Inputs], budget_bytes: int) -> None:
        """Make a step that all ranks follow the expected one, and forget the others.

        Args:
            budget_bytes: for which it was planned.
        """
        self.lease = self.lease.replace(budget_bytes)
        self.entries = [PlanCacheEntry(planned, Source.MEASURED, calls=calls, is_agreed=True)]

    def set_budget(self, nbytes: int, held_bytes: int | None = None, *, regroups: bool = False) -> None:
        """Plan the expected step for another budget, and drop the other plans until their steps recur.

        Args:
            held_bytes: that the job holds between steps, model state that is away included; None if unknown.
            regroups: whether optimizers update fewer parameters at a time if they have to, and unused state can leave.

        Raises:
            Infeasible: no plan fits; the cache is unchanged.
        """
        before, self.lease = self.lease, self.lease.replace(nbytes)
        try:
            entry = self.current
            planned = None
            plan_again = functools.partial(self._plan_again, held_bytes=held_bytes, regroups=regroups)
            if entry is None:
                latest = self.unplanned.latest
                if latest is not None and held_bytes is not None and nbytes < latest[2]:
                    plan_again(latest[0], latest[1])
            elif nbytes <= before.device_bytes or not list_unused_state(entry.planned.trace):
                planned = plan_again(entry.planned.trace, entry.planned.costs)
            if entry is None or planned is None:  # the next capture tells whether unused state fits as well
                self.entries = []
            else:
                fresh = dataclasses.replace(entry, planned=planned, busy_seconds=[], is_proven=False, is_short=False)
                self.entries = [fresh]
        except BaseException:
            self.lease = before
            raise

    def _plan_again(self, trace: Trace, costs: Costs, held_bytes: int | None, *, regroups: bool) -> PlannedStep | None:
        try:
            return self.plan_step(trace, costs)
        except Infeasible as error:
            if held_bytes is not None and self.unplanned.have_run(trace, self.lease.device_bytes, held_bytes):
                return None
            if error.needed_bytes <= self.lease.device_bytes:
                raise  # the tier below is too small
            if regroups:
                trace = leave_out_unused_state(trace, self.planner.config.min_offload_bytes)
            obstacle = self.planner.find_obstacle(
                trace, digest(trace), None, self.lease, regroups=regroups, is_running=True
            )
            if obstacle is not None:
                error.add(obstacle)
                raise
            return None
        except TraceError as error:
            logger.warning("%s", explain_fault(error))
            return None

    def replan(self, entry: PlanCacheEntry, measurements: Measurements) -> None:
        """Replan a step with measured costs of its ops.

        Raises:
            Infeasible: no plan fits the budget.
        """
        trace, digest = entry.planned.trace, entry.planned.costs.trace_digest
        self.planner.past.add(trace, measurements.op_seconds)
        measurements = leave_out_replays(trace, entry.planned.plan, measurements)
        costs = self.planner.price(trace, digest, measurements)
        level = find_level(entry.planned.plan)
        entry.adopt(self.plan_step(trace, costs, first=level, climbs=level != QUICK))

    def record_again(self, entry: PlanCacheEntry, measurements: Measurements) -> None:
        """Record another measurement of a step whose prediction is doubted.

        After the last one the step is planned again with smoothed times, unless they agree with the prediction.
        """
        entry.recordings.append(measurements)
        if len(entry.recordings) < STEPS_MEASURED_AGAIN:
            return
        smoothed = smooth_recordings(entry.recordings, entry.planned.costs.workspace_bytes)
        entry.recordings.clear()
        entry.source = Source.MEASURED
        if not is_off(smoothed.step_seconds - smoothed.stall_seconds, entry.predicted_seconds):
            return
        logger.info("%s: steps take another time than predicted, and are planned again", entry.planned.trace.name)
        with keeping_plan():
            self.replan(entry, smoothed)

    def calibrate_time(self, entry: PlanCacheEntry, record: StepRecord) -> None:
        """Correct the forecast time of later steps by the measured time of the first planned ones.

        If two steps in a row differ from the prediction by more than 30 %, and all such steps together by as much time
        as measuring and planning take, the next ones are measured op by op. The first ones may be faster than
        predicted, since a captured step runs in cold memory; after them the corrected forecast is the prediction. Where
        the host does not wait for ops, its time only tells when it sets the pace.
        """
        waits = self.planner.device.type == "cpu"
        seconds = record.seconds - record.stall_seconds
        if not waits:
            seconds = max(seconds, entry.predicted_seconds)
        is_settled = len(entry.busy_seconds) > STEPS_THAT_SET_THE_PACE
        if not is_settled:
            entry.busy_seconds.append(seconds)
            if len(entry.busy_seconds) == 1:
                return  # it ran with cold caches, allocator and spill file
        planning_seconds = self.planner.times.expect(entry.planned.plan.strategy, 0.0)
        cost_seconds = planning_seconds + STEPS_MEASURED_AGAIN * entry.measuring_seconds
        if waits and entry.check.fails(
            seconds, entry.predicted_seconds, only_slower=not is_settled, cost_seconds=cost_seconds
        ):
            if entry.planned.is_plain:  # planning again would change nothing
                entry.busy_seconds.clear()
                return
            if entry.source is Source.MEASURED and not entry.is_agreed:
                entry.source = Source.DOUBTED
        if not is_settled:
            beyond_seconds = statistics.median(entry.busy_seconds[1:]) - entry.planned.busy_seconds
            entry.planned = entry.planned.correct(beyond_seconds)
            if len(entry.busy_seconds) > STEPS_THAT_SET_THE_PACE:
                entry.predicted_seconds = entry.planned.busy_seconds

    def plan_step(self, trace: Trace, costs: Costs, *, first: str = QUICK, climbs: bool = True) -> PlannedStep:
        """Return a step with a plan for the present limits. Arguments and errors: as for `StepPlanner.plan`."""
        return self.planner.plan(trace, costs, self.lease, first=first, climbs=climbs)

    def plan_again(self, entry: PlanCacheEntry, trace: Trace, costs: Costs, *, first: str = QUICK) -> bool:
        """Plan a step again, for other costs or with more time. Return whether it has a new plan."""
        before = entry.planned
        with keeping_plan():
            entry.replace(self.plan_step(trace, costs, first=first))
        return entry.planned is not before


def _count_lost_seconds(record: StepRecord) -> float:
    """Return the seconds of a step that a better plan, or any plan at all, is expected to save."""
    return record.stall_seconds + GAIN * record.seconds


def list_sizes(trace: Trace) -> list[int]:
    """Return the bytes of each save of a trace; 0 for tensors without a plain storage."""
    return [trace.storages[save.storage].nbytes for save in trace.saves]
