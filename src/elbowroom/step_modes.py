"""Runs each step of a room in one of its modes: plain, planned, dynamic or capture."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Generator, Iterator, Sequence

from elbowroom.advice import complete, note_torn_update
from elbowroom.agreed_plans import AgreedPlans
from elbowroom.bytes_beside import BytesBeside, count_live
from elbowroom.capture_schedule import CaptureSchedule
from elbowroom.captured_steps import CapturedSteps
from elbowroom.errors import Infeasible, MemoryRefused, Thrashing, TierError
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.cuda_ledger import CudaLedger
from elbowroom.hooks.failed_backward import forget_failed_backward
from elbowroom.hooks.gradient_buckets import GradientBuckets
from elbowroom.hooks.meter import Meter
from elbowroom.hooks.replica_gradients import ReplicaGradients
from elbowroom.hooks.sharded import find_replicas
from elbowroom.ir.journal import Mode, StepRecord
from elbowroom.job import Job
from elbowroom.metering import Metering
from elbowroom.plain_step_check import PlainStepCheck
from elbowroom.plan_cache import PlanCache
from elbowroom.plan_cache_entry import OpBytes, PlanCacheEntry
from elbowroom.residency.access_history import AccessHistory
from elbowroom.running_step import RunningStep
from elbowroom.runtime.between_steps import BetweenSteps
from elbowroom.runtime.error_frames import clear_frames
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.sliced_ops import SlicedOps
from elbowroom.runtime.state_pager import StatePager
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_runner import StepRunner
from elbowroom.runtime.transfers import Transfers
from elbowroom.tracing.live import LiveCapture, explain_no_needs
from elbowroom.tracing.residents import FirstUpdates

NEW_KINDS = "hardly any of the last steps was of a kind that has a plan"


class StepModes:
    """Chooses the mode of each step and runs it.

    Args:
        job, cache, metering: of the room.
        transfers: moves bytes between tiers.
        ledger: counts bytes on the device.
        pager: moves model state, unless that stays on the device, and results of ops that run in slices.
        sliced_ops: runs ops in slices that have no room as a whole.
        agreed: agrees on plans with the other ranks of a distributed job; None if the job is not distributed.

    Attributes:
        agreed, sliced_ops: as given.
        captured: plans captured steps.
    """

    def __init__(
        self,
        job: Job,
        cache: PlanCache,
        metering: Metering,
        transfers: Transfers,
        ledger: CpuLedger | CudaLedger,
        pager: StatePager,
        sliced_ops: SlicedOps,
        agreed: AgreedPlans | None = None,
    ) -> None:
        self._job = job
        self._cache = cache
        self._metering = metering
        self._transfers, self._ledger = transfers, ledger
        self._pager = pager
        self.sliced_ops = sliced_ops
        self._between_steps = BetweenSteps(ledger, pager)
        replicas = find_replicas(job.model)
        self._gradients = ReplicaGradients(replicas, pager)
        self._buckets = GradientBuckets(replicas, ledger)
        self._first_updates = FirstUpdates(job.optimizers)
        self.agreed = agreed
        self.schedule = CaptureSchedule()
        self.captured = CapturedSteps(job, cache, metering, pager, sliced_ops, self.schedule, agreed)
        self._plain_check = PlainStepCheck(job, cache, ledger, metering, pager)
        self._beside = BytesBeside(cache)
        self._history = AccessHistory(is_bounded=cache.lease.host_bytes is not None)
        self._running: RunningStep | None = None
        # Not a method, which would make a cycle of this and the runner.
        self._complete_error = functools.partial(
            complete, model=job.model, optimizers=job.optimizers, moves_state=job.moves_state
        )

    @property
    def runner(self) -> StepRunner | None:
        """Runner of the current or last step; None for a plain step."""
        return None if self._running is None else self._running.runner

    @property
    def was_refused(self) -> bool:
        """True if the current or last step was refused memory."""
        return self._running is not None and self._running.was_refused

    def close(self) -> None:
        """Drop the last step's runner, remove all hooks, and limit nothing between steps any more."""
        self._running = None
        self._gradients.close()
        self._between_steps.end()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context in which one step runs. Errors: as for `Room.step`."""
        agreed = self.agreed
        self._between_steps.end()
        with contextlib.nullcontext() if agreed is None else agreed.step():
            entry, self._running = self._cache.current, None
            self._metering.budget_bytes = self._cache.lease.device_bytes
            try:
                if entry is not None:
                    self._transfers.prepare(entry.planned.placement, gives_back=not self._cache.varies)
                yield from self._choose(entry)
                if agreed is not None and agreed.is_due and agreed.settle(goes_without=self.captured.is_paging):
                    self.schedule.note_success()
            except (Infeasible, MemoryRefused, Thrashing) as error:
                if isinstance(error, Infeasible):
                    self._complete_error(error)
                    error.completion = None
                note_torn_update(error, self._job.optimizers)
                # A notebook keeps the last traceback, whose frames would keep tensors alive.
                clear_frames(error)
                if self._running is not None and (begun_as := self._running.expected) is not None:
                    self._cache.remove(begun_as)  # the next step is observed from its beginning
                    self._plain_check.distrust(self._running.calls)
                raise
            except TierError as error:
                note_torn_update(error, self._job.optimizers)
                clear_frames(error)
                raise
            finally:
                if self._running is not None:
                    self._running.close()
                if self.was_refused:
                    forget_failed_backward()
                self._buckets.look()
                self._between_steps.begin(self._cache.lease.device_bytes)

    def _choose(self, entry: PlanCacheEntry | None) -> Iterator[None]:
        agreed = self.agreed
        if self._job.config.mode == "dynamic" or (agreed is not None and agreed.is_dynamic):
            return self._run_dynamic("")
        if entry is not None and self.schedule.is_due_again(entry.planned.plan):
            self._cache.remove(entry)
            entry = None
        if entry is None and agreed is not None and agreed.is_due:
            return self._run_capture()
        if entry is not None and self.schedule.awaits_unknown(self._metering.steps):
            return self._run_awaited()
        if self.schedule.is_due(self._metering.steps, knows_some=entry is not None):
            return self._run_capture()
        if entry is None:
            return self._run_dynamic(self.schedule.reason)
        knows_trained = self._plain_check.knows_trained()
        has_state = knows_trained and self._first_updates.are_over()
        awaits_state = not has_state and self._pager.is_needed(self._cache.lease.device_bytes)
        if knows_trained and not awaits_state:
            told = self._plain_check.list_told() if agreed is None else ()
            if entry.planned.is_plain and self._plain_check.fits(entry):
                return self._run_plain(entry, told)
            if told:
                return self._run_plain(entry, told)
        if self._cache.knows_few and not (awaits_state or entry.is_agreed):
            return self._run_dynamic(NEW_KINDS)
        return self._run_planned(entry, awaits_state=awaits_state)

    # -- modes ----------------------------------------------------------------------------------------------------

    def _run_plain(self, entry: PlanCacheEntry, told: Sequence[PlanCacheEntry]) -> Iterator[None]:
        """Run a step without a runner. `told`: kinds that it may turn out to be by the shapes of its inputs."""
        moves_state = any(each.planned.candidate.state_schedule is not None for each in told)
        has_groups = any(map(self._plain_check.needs_groups, (entry, *told)))
        self._begin_paging(may_move=moves_state, is_planned=moves_state, has_groups=has_groups)
        meter = self._metering.make()
        step = yield from self._run(None, meter, None, entry, told)
        if step.runner is not None or step.unwatched:
            record, followed = self._settle(step, meter)
            if followed is not None and record.mode is Mode.PLANNED:
                self._cache.calibrate_time(followed, record)
                self._cache.improve(followed, record)
                if step.is_usual:
                    self._beside.note_followed(followed, record.peak_bytes or 0)
            return
        entry = step.expected or entry
        record = self._metering.record(Mode.PLAIN, step.seconds, None, meter, "")
        if not (step.is_usual and entry.planned.is_plain):  # one that needs a plan has not called the model
            return
        self._cache.record_hit(entry, step.calls)
        self._cache.calibrate_time(entry, record)
        peak_bytes = record.peak_bytes or 0
        self._cache.record_growth(entry, peak_bytes - meter.base_bytes)
        if peak_bytes > self._cache.lease.device_bytes:  # on CUDA, where the ledger does not ask for room
            self._cache.remove(entry)

    def _run_planned(self, entry: PlanCacheEntry, *, awaits_state: bool) -> Iterator[None]:
        """Run a step by its plan. `awaits_state`: an optimizer may update for the first time, and make its state."""
        live_bytes = count_live(self._job, self._ledger, self._pager, entry)
        self._beside.watch(entry, live_bytes)
        moves_state = entry.planned.candidate.state_schedule is not None
        is_over = entry.planned.count_spare_bytes(self._cache.lease.device_bytes, live_bytes) < 0
        self._begin_paging(
            may_move=moves_state or awaits_state or is_over or self.captured.is_paging,
            is_planned=moves_state,
            has_groups=bool(entry.planned.trace.updates) and self._plain_check.needs_groups(entry),
        )
        # After planning from fake tensors, and where predictions are wrong, steps are observed op by op.
        measuring = entry.is_measuring(self._job.config.settling_steps)
        meter = self._metering.make(is_detailed=measuring)
        capture = self._make_capture(meter) if measuring else None
        measures_bytes = entry.op_bytes is OpBytes.DOUBTED
        varies = (self._cache.varies or entry.is_short) and capture is None
        runner = self._make_runner(Phase.MANAGED if varies else Phase.FOLLOWING_PLAN, self._cache.entries, capture)
        step = yield from self._run(runner, meter, capture)
        record, followed = self._settle(step, meter)
        if record.mode is Mode.DYNAMIC:
            return
        if capture is not None and measures_bytes:
            self.captured.learn_bytes(entry, capture, record)
        elif capture is not None:
            self.captured.learn(entry, capture, record, is_followed=followed is entry)
        elif followed is entry and record.needs:
            if not self._cache.varies:  # else steps take longer than the plan alone does
                self._cache.calibrate_time(entry, record)
            if not varies and not runner.state.left_for_room:
                self._beside.note_followed(entry, record.peak_bytes or 0)
        if followed is not None and capture is None:
            self._cache.improve(followed, record)
            if followed is entry and not (varies or entry.is_agreed):
                self.schedule.note_followed(entry.planned.plan, is_whole=self._pager.follows_plan)

    def _run_awaited(self) -> Iterator[None]:
        """Run a step as one of the known kinds, and capture it if it turns out at its first save to be of none."""
        self._begin_paging(may_move=True, is_unknown=True)
        meter = self._metering.make(is_detailed=True)
        capture = self._make_capture(meter)
        runner = self._make_runner(Phase.MANAGED, self._cache.entries, capture)
        runner.state.captured_bytes = frozenset(self.schedule.awaited_bytes)
        step = yield from self._run(runner, meter, capture)
        if not runner.state.is_awaited:
            self._settle(step, meter)
            return
        record = self._metering.record(Mode.CAPTURE, step.seconds, runner.state, meter, "")
        self.schedule.capture_seconds = record.seconds
        self.captured.adopt(capture, record, step.calls)

    def _run_dynamic(self, note: str) -> Iterator[None]:
        least_bytes = self._ledger.live_bytes + 2 * self._metering.largest_growth_bytes
        self._begin_paging(
            may_move=True,
            is_unknown=self._metering.steps == 0 or least_bytes > self._cache.lease.device_bytes,
            has_groups=self._plain_check.needs_groups(self._cache.current),
        )
        meter = self._metering.make()
        runner = self._make_runner(Phase.UNPRESSURED)
        step = yield from self._run(runner, meter, None)
        record = self._metering.record(Mode.DYNAMIC, step.seconds, runner.state, meter, note)
        saved = runner.state.saved_tensors
        if saved.needs:
            self.schedule.note_needs()
        if self._cache.entries and saved.saves:
            if (entry := self._cache.find(saved.sizes)) is not None:
                self._cache.record_hit(entry, step.calls)
            else:
                self._plain_check.note_miss(step.calls)
                self.captured.note_miss(saved.sizes, record)

    def _run_capture(self) -> Iterator[None]:
        self._begin_paging(may_move=True, is_unknown=True)
        meter = self._metering.make(is_detailed=True)
        capture = self._make_capture(meter)
        runner = self._make_runner(Phase.CAPTURING, capture=capture)
        step = yield from self._run(runner, meter, capture)
        note = "" if runner.state.saved_tensors.needs else explain_no_needs()
        record = self._metering.record(Mode.CAPTURE, step.seconds, runner.state, meter, note)
        self.schedule.capture_seconds = record.seconds
        if note:
            self.schedule.note_no_needs(self._metering.steps - 1, note, knows_some=bool(self._cache.entries))
        else:
            self.schedule.note_needs()
            self.captured.adopt(capture, record, step.calls)

    def _begin_paging(
        self, *, may_move: bool, is_planned: bool = False, is_unknown: bool = False, has_groups: bool = False
    ) -> None:
        if self._job.optimizer_states.were_replaced():
            self._ledger.adopt(self._job.list_residents())
        may_move = may_move and self._job.moves_state
        self._pager.begin_step(
            self._cache.lease.device_bytes,
            may_move=may_move,
            is_planned=is_planned and may_move,
            is_unknown=is_unknown,
            has_groups=has_groups,
        )

    def _run(
        self,
        runner: StepRunner | None,
        meter: Meter,
        capture: LiveCapture | None,
        expected: PlanCacheEntry | None = None,
        told: Sequence[PlanCacheEntry] = (),
    ) -> Generator[None, None, RunningStep]:
        live_bytes = count_live(self._job, self._ledger, self._pager, None)

        def make_runner(found: PlanCacheEntry | None) -> StepRunner:
            entries = self._cache.entries
            if found is not None:
                self._beside.watch(found, live_bytes)
                entries = [found, *(each for each in entries if each is not found)]
                return self._make_runner(Phase.FOLLOWING_PLAN, entries, skipped_ops=found.ops_before_call or 0)
            return self._make_runner(Phase.MANAGED if entries else Phase.UNPRESSURED, entries)

        self._running = step = RunningStep(
            self._job, self._ledger, self._cache.lease, meter, runner=runner, capture=capture, expected=expected,
            told=told, make_runner=make_runner,
            has_ample_room=expected is not None and self._plain_check.has_ample_room(expected),
            number=self._metering.steps, complete_error=self._complete_error,
        )  # fmt: skip
        with step.running():
            yield
        if runner is not None:
            self._plain_check.note_watched()
        return step

    def _settle(self, step: RunningStep, meter: Meter) -> tuple[StepRecord, PlanCacheEntry | None]:
        """Record a step that was expected to be of a known kind. Return its record, and the entry that it matched."""
        state = None if step.runner is None else step.runner.state
        if state is not None and not state.saved_tensors.saves and not step.may_hide_saves:
            # An evaluation. It is of no kind that a plan would serve, nor a sign that steps change.
            return self._metering.record(Mode.DYNAMIC, step.seconds, state, meter, explain_no_needs()), None
        known = {id(each.planned.candidate): each for each in self._cache.entries}
        candidates = [] if state is None else [known.get(id(each)) for each in state.candidates]
        expected = candidates[0] if candidates else None
        followed = None if state is None or state.followed is None else candidates[state.followed]
        mode = Mode.DRIFTED if followed is None else Mode.PLANNED
        why = "; ".join(filter(None, (step.unwatched, "" if state is None else state.drift)))
        activities = () if state is None else state.activity_log.finish(self._transfers)  # `record` forgets them
        record = self._metering.record(mode, step.seconds, state, meter, why)
        if followed is not None:
            followed.activities = activities
            # A plain step that grew is unlike those that need no watching.
            self._cache.record_hit(followed, step.calls if step.expected is None or step.is_usual else Counter())
        elif state is None or expected is None or not self._beside.note_left(expected, state):  # else of that kind
            self._plain_check.note_miss(step.calls)
            sizes = () if state is None else state.saved_tensors.sizes
            self.captured.note_miss(sizes, record, is_whole=step.expected is None)
        return record, followed

    def _make_capture(self, meter: Meter) -> LiveCapture:
        job = self._job
        return LiveCapture(job.name, job.device, job.model, job.optimizers, meter, is_first=self._metering.steps == 0)

    def _make_runner(
        self,
        phase: Phase,
        entries: Sequence[PlanCacheEntry] = (),
        capture: LiveCapture | None = None,
        *,
        skipped_ops: int = 0,
    ) -> StepRunner:
        job = self._job
        budget_bytes = self._cache.lease.device_bytes
        environment = StepEnvironment(
            device=job.device,
            budget_bytes=budget_bytes,
            ledger=self._ledger,
            transfers=self._transfers,
            list_residents=job.list_residents,
            profile=self._cache.planner.profile,
            history=self._history,
            policy=job.config.policy,
            min_bytes=job.config.min_offload_bytes,
            pager=self._pager,
            sliced_ops=self.sliced_ops,
            list_kept=job.list_kept,
            name_residents=job.name_residents,
            complete_error=self._complete_error,
        )
        expected = entries[0] if entries else None
        live_bytes = count_live(job, self._ledger, self._pager, expected)
        return StepRunner(
            phase,
            environment,
            candidates=[entry.planned.candidate for entry in entries],
            spare_bytes=0 if expected is None else expected.planned.count_spare_bytes(budget_bytes, live_bytes),
            is_plan_proven=expected is None or expected.is_proven,
            observer=None if capture is None else capture.tracer,
            skipped_ops=skipped_ops,
        )
