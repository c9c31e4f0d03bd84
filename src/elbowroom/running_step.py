"""A running training step: the hooks attached to it, and the switch of a growing plain step to a runner."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch

from elbowroom.cuda_allocator.use import serving
from elbowroom.errors import Infeasible
from elbowroom.hooks.compiled_regions import noticing_compiles
from elbowroom.hooks.input_guard import CannotEnter, HookInsertionPoint, Inputs, observe_inputs
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.main_thread_calls import call_in_main_thread
from elbowroom.hooks.meter import Meter
from elbowroom.hooks.op_dispatch import dispatching_ops_to
from elbowroom.hooks.worker_processes import end_in_workers
from elbowroom.ir.lease import Lease
from elbowroom.job import Job
from elbowroom.kinds_by_inputs import find_told
from elbowroom.plan_cache_entry import PlanCacheEntry
from elbowroom.runtime.ending_step import ending_step
from elbowroom.runtime.memory_guard import explain_growth
from elbowroom.runtime.step_runner import StepRunner
from elbowroom.tracing.gradients import telling_gradients
from elbowroom.tracing.live import LiveCapture

logger = logging.getLogger(__name__)

FIRST_CALLS = 4
"""Calls of the model whose shapes are compared if the step has a runner, or takes at most half of the budget."""

GROWTH = 1 / 16
"""Share by which a plain step may exceed its expected allocations before it gets a runner."""


def may_attach_later(ledger: Ledger) -> bool:
    """Return True if a step that begins now can get a runner when it holds more than expected.

    The ledger must ask for room, and a runner can only be attached between two Python calls, for which only the main
    thread can be interrupted.
    """
    return ledger.scope is not None and threading.current_thread() is threading.main_thread()


class RunningStep:
    """One step, from beginning to end.

    A plain step runs without a runner, since everything is expected to fit. It gets one when the model is called with
    other shapes or more often than in earlier steps, or when the step allocates more than they did. With ample room it
    gets one only when it has taken half of that room. If the shapes are those of another kind, the step goes on as one
    of that kind.

    Args:
        job: its model's calls are observed.
        ledger: counts the step's bytes.
        lease: limit on these bytes.
        meter: measures this step.
        runner: manages the step; None for a plain one.
        capture: traces the step; None if it is not captured.
        expected: expected kind of a plain step; None for others. It may need a plan if the inputs tell the kind.
        told: kinds that a plain step may turn out to be by the shapes of its inputs.
        make_runner: makes a runner for a plain step that grows (None), or that is of a kind that needs a plan.
        has_ample_room: whether larger steps of any kind fit, too.
        number: of the step, for messages.
        complete_error: completion of the step's errors, see `Infeasible`.

    Attributes:
        expected: as given, or the kind that the inputs have told since.
        runner: as given, or made during the step.
        calls: shapes that the model was called with, and their counts, as far as calls are observed.
        is_usual: whether the model was called as in earlier steps of the expected kind, as far as calls are observed.
        unwatched: why a plain step that grew got no runner; "" otherwise.
        seconds: wall time of the block.
    """

    def __init__(
        self,
        job: Job,
        ledger: Ledger,
        lease: Lease,
        meter: Meter,
        *,
        runner: StepRunner | None,
        capture: LiveCapture | None,
        expected: PlanCacheEntry | None,
        told: Sequence[PlanCacheEntry],
        make_runner: Callable[[PlanCacheEntry | None], StepRunner],
        has_ample_room: bool,
        number: int,
        complete_error: Callable[[Infeasible], None],
    ) -> None:
        self._job = job
        self._ledger = ledger
        self._lease = lease
        self._meter = meter
        self._capture = capture
        self.expected = expected
        self._told = told
        self._make_runner = make_runner
        self._has_ample_room = has_ample_room
        self._number = number
        self._complete_error = complete_error
        self._place = HookInsertionPoint()
        self._attached = contextlib.ExitStack()
        self._is_running = False
        self._limit_bytes = lease.device_bytes
        self._begun_bytes = 0
        self.runner = runner
        self.calls: Counter[Inputs] = Counter()
        self.is_usual = True
        self.unwatched = ""
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which the step runs."""
        runner, capture = self.runner, self._capture
        with serving(self._job.device), self._attached as stack:
            stack.enter_context(self._ledger.counting(self._lease.device_bytes, self._make_room))
            self._ledger.refusals.clear()
            self._begun_bytes = self._ledger.live_bytes
            self._meter.start()
            stack.callback(self._meter.stop)
            self._limit_growth()
            calls = FIRST_CALLS if self._needs_few_calls() else None
            pause = stack.enter_context(observe_inputs(self._job.model, self._see_inputs, self._adopt_inputs, calls))
            timer = None if capture is None else capture.tracer
            stack.enter_context(noticing_compiles(self._note_change, pause, timer))
            if capture is not None:
                stack.enter_context(dispatching_ops_to(capture.tracer))
                stack.enter_context(telling_gradients(capture.tracer, self._job.model))
            if runner is not None:
                runner.begin()
                # Innermost, so that op times exclude the runner's own work.
                stack.enter_context(dispatching_ops_to(runner.state.watcher))
                self._finish_at_end(runner)
            self._is_running = True
            begin = time.perf_counter()
            try:
                yield
            finally:
                self._is_running = False
            self.seconds = time.perf_counter() - begin

    def close(self) -> None:
        """Let go of what has captured the step, once the step has been recorded."""
        if self._capture is not None:
            self._capture.close()

    @property
    def was_refused(self) -> bool:
        """True if the step was refused memory."""
        return bool(self._ledger.refusals)

    @property
    def may_hide_saves(self) -> bool:
        """True if autograd may have saved tensors unseen, since the step was not watched from its beginning."""
        return self.expected is not None and (not self.calls or any(each.has_gradients for each in self.calls))

    # -- plain steps that grow ------------------------------------------------------------------------------------

    def _limit_growth(self) -> None:
        """Have the ledger call `_make_room` before a plain step holds much more than earlier ones."""
        if self.expected is None or not may_attach_later(self._ledger):
            return
        live_bytes = self._begun_bytes
        growth_bytes = int((1 + GROWTH) * self.expected.expect_growth()) + (1 << 20)
        if self._has_ample_room:
            growth_bytes = max(growth_bytes, (self._lease.device_bytes - live_bytes) // 2)
        self._limit_bytes = min(self._lease.device_bytes, live_bytes + growth_bytes)
        self._ledger.set_limit(self._limit_bytes)

    def _needs_few_calls(self) -> bool:
        """Return True if observing the first calls of the model is enough.

        It is in a step with a runner, and in a plain one if half of the budget is left when it gets a runner: storages
        saved before that cannot leave.
        """
        if self.expected is None:
            return self._capture is None
        return self._limit_bytes <= self._lease.device_bytes // 2

    def _adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        """Count the inputs of a step with a runner. Return True if any of them was new."""
        return self.runner is not None and self._ledger.adopt_inputs(tensors)

    def _see_inputs(self, inputs: Inputs) -> None:
        self.calls[inputs] += 1
        has_gradients = inputs.has_gradients and torch._C._current_graph_task_id() == -1
        if self._capture is not None:
            self._capture.note_call(has_gradients=has_gradients)
        expected = self.expected
        if expected is None:
            return
        needs_runner = self.runner is None and not expected.planned.is_plain
        if expected.is_usual(inputs, self.calls[inputs]) and not needs_runner:
            return
        told = find_told(self.calls, self._told) if self.runner is None else None
        if told is None or not (told.planned.is_plain or has_gradients):
            self._note_change()
            return
        self.expected = told
        if told.planned.is_plain:
            self._limit_growth()
        else:
            self._watch_from_here(told)

    def _note_change(self) -> None:
        """Note that a plain step differs from those before it: its model's inputs do, or code is compiled."""
        self.is_usual = False
        if not self._has_ample_room:
            self._watch_from_here()

    def _watch_from_here(self, told: PlanCacheEntry | None = None) -> None:
        """Attach a runner to a plain step, from the next op on. `told`: the kind that it is of, if it is known."""
        if self.expected is None or self.runner is not None or not self._is_running:
            return
        runner = self._make_runner(told)
        try:
            self._place.enter(runner.state.watcher, self._attached)
        except CannotEnter as error:
            if not self.unwatched:
                logger.warning("step %d may take more than those before it, unwatched: %s", self._number, error)
            self.unwatched = f"may have taken more than those before it, unwatched: {error}"
            return
        self.runner = runner  # which makes room from now on, for state that its plan brings back, too
        runner.begin()
        self._finish_at_end(runner)

    def _finish_at_end(self, runner: StepRunner) -> None:
        self._attached.enter_context(ending_step(runner.finish))
        if runner.sliced_ops is not None:
            self._attached.callback(runner.sliced_ops.stop_recording)
            self._attached.enter_context(ending_step(runner.sliced_ops.run_waiting))
        end_in_workers()

    def _make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Make room for a request that would exceed the limit. Return True if the request should be retried.

        Raises:
            Infeasible: the request would exceed the budget, and nothing can leave.
        """
        former = len(self._ledger.refusals)
        try:
            return self._find_room(requested_bytes, missing_bytes)
        except BaseException as error:
            self._ledger.refusals[former:] = [f"{type(error).__name__}: {error.args[0] if error.args else ''}"]
            raise

    def _find_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        if self.runner is not None:
            return self.runner.make_room(requested_bytes, missing_bytes)
        is_over = self._ledger.live_bytes + requested_bytes > self._limit_bytes  # otherwise the system refused
        if self._limit_bytes < self._lease.device_bytes and is_over:
            self._limit_bytes = self._lease.device_bytes
            self._ledger.set_limit(self._lease.device_bytes)
            call_in_main_thread(self._watch_from_here)
            return True
        raise explain_growth(requested_bytes, missing_bytes, self._lease.device_bytes, self._complete_error)
