"""A Room: one training job within one budget."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.advice import advise
from elbowroom.arena.use import serving
from elbowroom.config import Config
from elbowroom.errors import Infeasible, MemoryRefused, Thrashing, TraceError, UsageError
from elbowroom.hardware.memory import cut_blocks_to_size
from elbowroom.hardware.probe import probe
from elbowroom.hooks.compiled import noticing_compiles
from elbowroom.hooks.ledger import make_ledger
from elbowroom.hooks.mark import is_marked, mark, unmark
from elbowroom.hooks.meter import Meter
from elbowroom.hooks.sentry import Inputs, OutOfReach, Place, seeing_inputs
from elbowroom.hooks.watching import watching
from elbowroom.hooks.workers import ended_in_workers
from elbowroom.ir.costs import Measurements
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.identity import digest
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.trace import Trace
from elbowroom.metering import Metering
from elbowroom.planner.bounds import bound_plan
from elbowroom.repertoire import Act, Planned, Repertoire, list_sizes
from elbowroom.report.summary import summarize
from elbowroom.residency.habits import Habits
from elbowroom.runtime.finishing import finishing
from elbowroom.runtime.online_engine import OnlineEngine
from elbowroom.runtime.open import open_transfers
from elbowroom.runtime.shortage import explain_growth
from elbowroom.tracing.fake import capture_fake
from elbowroom.tracing.live import LiveCapture
from elbowroom.tracing.residents import find_staying, list_resident_tensors
from elbowroom.tracing.tracer import telling_gradients

logger = logging.getLogger(__name__)

MOST_STEPS_BETWEEN_CAPTURES = 64
"""Where steps cannot be planned, how long at most until the next one is captured to see whether that has changed."""


class Room:
    """Fits the training steps of one model into a number of bytes. Made by `elbowroom.fit`.

    Attributes:
        budget_bytes: what the job may hold on its device.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        budget_bytes: int,
        config: Config,
        *,
        device: torch.device,
        step: Callable[[], Any] | None = None,
        profile: HardwareProfile | None = None,
    ) -> None:
        if is_marked(model):
            raise UsageError("this model already has a room; call its detach() first")
        self.budget_bytes, self.config = budget_bytes, config
        self._model, self._optimizers, self._device = model, tuple(optimizers), device
        self._name = type(model).__name__
        self._ledger = make_ledger(device)
        self._detached = True  # until there is something to detach
        self._captures = self._futile_captures = self._next_capture = 0
        self._engine: OnlineEngine | None = None
        self._calls: Counter[Inputs] = Counter()  # of the model, in this step
        self._habits = Habits(is_bounded=config.host_bytes is not None)
        self._inside = self._has_recurred = False
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._ledger.close)
            self._repertoire = Repertoire(budget_bytes, config, device, profile or self._probe(), self._ledger)
            self._transfers = open_transfers(device, config.spill_folder, config.host_bytes)
            undoing.callback(self._transfers.close)
            self._metering = Metering(device, self._transfers, self._ledger)
            self._ledger.adopt(self._list_residents())
            if step is not None and config.mode != "dynamic":
                self._plan_ahead(step)
            undoing.pop_all()
        if device.type == "cuda":
            cut_blocks_to_size()
        mark(model)
        self._detached = False

    @property
    def planned(self) -> Planned | None:
        """What is known of the step that is expected next, and decided about it; None until one has been captured."""
        return None if (current := self._repertoire.current) is None else current.planned

    # -- what the user calls --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step within the budget: its forward passes, backward passes and optimizer.

        Raises:
            UsageError: inside another step, or after `detach`.
            Infeasible: before an op whose working set is larger than the budget, whatever leaves; or at the end of the
                first steps, which have been carried out, when no plan fits them.
            MemoryRefused: the system gives less memory than the budget, and nothing more may leave.
            TierFull, TransferFailed: a move failed and there is no room to do without it.
        """
        if self._detached:
            raise UsageError("this room is detached; call elbowroom.fit again")
        if self._inside:
            raise UsageError("room.step() inside room.step(): one `with room.step():` is one whole training step")
        self._inside = True
        try:
            act = self._repertoire.current
            if act is not None:
                self._transfers.prepare(act.planned.placement, gives_back=not self._repertoire.varies)
            if self.config.mode == "dynamic":
                yield from self._run_dynamic("")
            elif (act is None or self._has_recurred) and self._metering.steps >= self._next_capture:
                yield from self._run_capture()
            elif act is None:
                yield from self._run_dynamic("it is not known what these steps do")
            elif act.planned.is_plain and self._fits_unwatched(act):
                yield from self._run_plain(act)
            else:
                yield from self._run_planned(act)
        except (Infeasible, MemoryRefused, Thrashing) as error:
            # A notebook keeps the last error, and with it every tensor of the functions that it ended.
            traceback.clear_frames(error.__traceback__)
            if isinstance(error, Infeasible):
                advise(error, self._model, self._optimizers)
            if self._engine is None and act in self._repertoire.acts:
                self._repertoire.acts.remove(act)  # the next step of this kind is watched
            raise
        finally:
            self._inside = False

    def journal(self) -> Journal:
        """What was measured so far."""
        return self._metering.journal()

    def report(self) -> str:
        """Forecast beside what was measured, and why each block is where it is, as text."""
        planned = self.planned
        if planned is None:
            return summarize(budget_bytes=self.budget_bytes, journal=self.journal())
        trace, costs, plan = planned.trace, planned.costs, planned.plan
        return summarize(
            budget_bytes=self.budget_bytes, journal=self.journal(), trace=trace, costs=costs, plan=plan,
            forecast=planned.forecast, bound_seconds=bound_plan(trace, costs, plan, self.config.host_bytes),
        )  # fmt: skip

    def detach(self) -> None:
        """Leave the model as it was. Graphs that are still alive can still be backpropagated."""
        if self._detached:
            return
        self._engine = None
        unmark(self._model)
        self._transfers.close()
        self._ledger.close()
        self._detached = True  # last: what an interruption leaves undone is done by the next call

    def __del__(self) -> None:
        if not getattr(self, "_detached", True):
            self.detach()  # forgotten: whoever has no room any more cannot detach it

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # -- running a step -------------------------------------------------------------------------------------------

    def _fits_unwatched(self, act: Act) -> bool:
        """Whether a step in which everything fitted will fit now: gradients may be there, say, that were not then."""
        is_steady = not (self._repertoire.varies or self.config.always_watch)
        return is_steady and self._ledger.has_room(act.planned.count_activations(), self.budget_bytes)

    def _run_plain(self, act: Act) -> Iterator[None]:
        meter = self._metering.make()
        acts = tuple(self._repertoire.acts)
        seconds = yield from self._run(None, meter, None, act)
        if self._engine is not None or self._unwatched:
            self._settle(acts, self._engine, seconds, meter)
            return
        record = self._metering.record(Mode.PLAIN, seconds, None, meter, "")
        self._repertoire.followed(act, self._calls)
        self._repertoire.keep_pace(act, record)
        if (record.peak_bytes or 0) > self.budget_bytes:  # on CUDA, where nobody is asked for room
            self._repertoire.acts.remove(act)

    def _run_planned(self, act: Act) -> Iterator[None]:
        # The first steps after planning ahead of any run are watched op by op, to learn what ops really cost.
        measuring = not act.is_measured and act.measured_steps < self.config.settling_steps
        meter = self._metering.make(is_detailed=measuring)
        capture = self._make_capture(meter) if measuring else None
        acts = tuple(self._repertoire.acts)
        is_awake = self._repertoire.varies and capture is None
        engine = self._make_engine(self.config.policy, acts, capture, is_awake=is_awake)
        seconds = yield from self._run(engine, meter, capture)
        record, followed = self._settle(acts, engine, seconds, meter)
        if capture is not None:
            act.measured_steps += 1
            self._learn(act, capture, record, is_followed=followed is act)
        elif followed is act:
            self._repertoire.keep_pace(act, record)

    def _settle(
        self, acts: Sequence[Act], engine: OnlineEngine | None, seconds: float, meter: Meter
    ) -> tuple[StepRecord, Act | None]:
        """A step is over that was expected to be one of those that are known: which it was, if any."""
        followed = None if engine is None or engine.followed is None else acts[engine.followed]
        mode = Mode.DRIFTED if followed is None else Mode.PLANNED
        why = self._unwatched if engine is None else engine.drift
        record = self._metering.record(mode, seconds, engine, meter, why)
        if followed is not None:
            self._repertoire.followed(followed, self._calls)
        elif self._repertoire.strayed(() if engine is None else engine.sizes):
            self._has_recurred = True
        return record, followed

    def _run_dynamic(self, note: str) -> Iterator[None]:
        meter = self._metering.make()
        engine = self._make_engine(self.config.policy, (), None)
        seconds = yield from self._run(engine, meter, None)
        self._metering.record(Mode.DYNAMIC, seconds, engine, meter, note)

    def _run_capture(self) -> Iterator[None]:
        meter = self._metering.make(is_detailed=True)
        capture = self._make_capture(meter)
        engine = self._make_engine(None, (), capture)
        seconds = yield from self._run(engine, meter, capture)
        note = "" if engine.needs else _explain_no_needs()
        record = self._metering.record(Mode.CAPTURE, seconds, engine, meter, note)
        if note:
            self._put_off_capture(note)
        else:
            self._adopt(capture, record, is_whole=not engine.refusal)

    def _put_off_capture(self, why: str = "") -> None:
        """A captured step was of no use: later ones may differ, but not all of them pay for that."""
        if why and not self._futile_captures:
            logger.warning("step %d: %s", self._metering.steps - 1, why)
        self._next_capture = self._metering.steps - 1 + min(2**self._futile_captures, MOST_STEPS_BETWEEN_CAPTURES)
        self._futile_captures += 1

    def _run(
        self, engine: OnlineEngine | None, meter: Meter, capture: LiveCapture | None, plain: Act | None = None
    ) -> Generator[None, None, float]:
        """Let the block run, and say how many seconds it took. `plain`: what it is expected to be, with no engine."""
        self._engine, self._calls, self._unwatched = engine, Counter(), ""  # or why an unusual call was not watched
        with serving(self._device), contextlib.ExitStack() as stack:
            stack.enter_context(self._ledger.counting(self.budget_bytes, self._make_room))
            self._metering.start(meter, engine, stack)
            place = Place()

            def see(inputs: Inputs) -> None:
                self._calls[inputs] += 1
                if plain is not None and self._engine is None and not plain.is_usual(inputs, self._calls[inputs]):
                    self._engage(place, stack)

            adopt = None if engine is None else self._ledger.adopt_input
            unseen = stack.enter_context(seeing_inputs(self._model, see, adopt))

            def notice() -> None:
                if plain is not None and self._engine is None:
                    self._engage(place, stack)

            stack.enter_context(noticing_compiles(notice, unseen, None if capture is None else capture.tracer))
            if capture is not None:
                stack.enter_context(watching(capture.tracer))
                stack.enter_context(telling_gradients(capture.tracer, self._model))
            if engine is not None:
                engine.begin()
                stack.enter_context(watching(engine.watcher))  # first, so that the times of ops are not its own
                stack.enter_context(finishing(engine.finish))
                stack.enter_context(ended_in_workers())
            begin = time.perf_counter()
            yield
            return time.perf_counter() - begin

    def _engage(self, place: Place, stack: contextlib.ExitStack) -> None:
        """What fitted as it was is called with something else: from here on this step is watched."""
        engine = self._make_engine(self.config.policy, self._repertoire.acts, None)
        try:
            place.enter(engine.watcher, stack)
        except OutOfReach as error:
            if not self._unwatched:
                logger.warning("step %d may take more than those before it, unwatched: %s", self._metering.steps, error)
            self._unwatched = f"may have taken more than those before it, unwatched: {error}"
            return
        engine.begin()
        stack.enter_context(finishing(engine.finish))
        stack.enter_context(ended_in_workers())
        self._engine = engine

    def _make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """A request would go over the budget. Returns whether to try again; `Infeasible` if nothing may leave."""
        if self._engine is not None:
            return self._engine.free(requested_bytes, missing_bytes)
        raise explain_growth(requested_bytes, missing_bytes, self.budget_bytes)

    def _make_capture(self, meter: Meter) -> LiveCapture:
        return LiveCapture(self._name, self._device, self._model, self._optimizers, meter)

    def _make_engine(
        self, policy: str | None, acts: Sequence[Act], capture: LiveCapture | None, *, is_awake: bool = True
    ) -> OnlineEngine:
        job = self._model, self._optimizers
        spare_bytes = None if is_awake or not acts else self.budget_bytes - acts[0].planned.forecast.peak_bytes
        return OnlineEngine(
            self._transfers, self._device, lambda: find_staying(*job), self.config.min_offload_bytes,
            budget_bytes=self.budget_bytes, policy=policy,
            profile=self._repertoire.profile, habits=self._habits, list_residents=self._list_residents,
            known=[act.planned.known for act in acts], ledger=self._ledger,
            is_awake=is_awake, spare_bytes=spare_bytes, observer=None if capture is None else capture.tracer,
        )  # fmt: skip

    def _list_residents(self) -> list[torch.Tensor]:
        return list_resident_tensors(self._model, self._optimizers)

    def _probe(self) -> HardwareProfile:
        """Measure this machine before the first step, in what the budget leaves beside the model."""
        storages = (each.untyped_storage() for each in self._list_residents() if each.layout is torch.strided)
        there = sum({each.data_ptr(): each.nbytes() for each in storages}.values())
        most_bytes = max(0, self.budget_bytes - there)
        profile = probe(str(self._device), spill_folder=self.config.spill_folder, most_bytes=most_bytes)
        self._ledger.trim()
        return profile

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan_ahead(self, step: Callable[[], Any]) -> None:
        try:
            trace = capture_fake(step, self._model, self._optimizers, name=self._name, device=self._device)
        except TraceError as error:
            logger.warning("%s", error)
            return
        if not trace.needs:
            return  # there is nothing to plan, and nothing to tell it by
        if why := self._add(trace, None):
            logger.warning("%s", why)

    def _add(self, trace: Trace, measurements: Measurements | None) -> str:
        """Plan a step. Returns why it stays without a plan and may run all the same, or "".

        Raises:
            Infeasible: it cannot run within the budget.
        """
        trace_digest = digest(trace)
        try:
            self._repertoire.add(trace, trace_digest, measurements)
        except Infeasible as error:
            if self._repertoire.acts or self._repertoire.fits_without_plan(trace, trace_digest, measurements):
                return f"steps like this one run without a plan: {error}"
            raise
        return ""

    def _adopt(self, capture: LiveCapture, record: StepRecord, is_whole: bool) -> None:
        """Plan what has just been captured, unless it is not yet what later steps will be.

        `is_whole`: whether all that may leave did: of what stayed, nobody knows how long the program itself held it.
        """
        self._captures += 1
        trace = capture.finish()
        if not (capture.is_settled and is_whole) and self._captures < self.config.settling_steps:
            return
        known, self._captures = self._repertoire, 0
        # Beside others it is planned when it recurs.
        if known.acts and (known.knows(trace) or not known.strayed(list_sizes(trace))):
            self._put_off_capture()
            return
        if why := self._add(trace, capture.measure(trace, record.seconds, record.stall_seconds)):
            self._put_off_capture(why)
            return
        self._futile_captures, self._has_recurred = 0, False
        known.acts[0].calls = self._calls

    def _learn(self, act: Act, capture: LiveCapture, record: StepRecord, *, is_followed: bool) -> None:
        """Plan again with measured op times, if the watched step was the planned one to the last op."""
        # What the block does after the step that was captured (noting its loss, say) changes nothing.
        measured = capture.measure(act.planned.trace, record.seconds, record.stall_seconds) if is_followed else None
        if measured is not None:
            try:
                self._repertoire.improve(act, measured)
            except Infeasible as error:  # it ran within the budget, and so may the next one
                self._repertoire.acts.remove(act)
                self._put_off_capture(f"steps like this one run without a plan: {error}")
        elif not is_followed or act.measured_steps == self.config.settling_steps:
            self._repertoire.acts.remove(act)  # the real step is not what the fake one was: capture it live


def _explain_no_needs() -> str:
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved-tensor hooks of the program come first, so that there is nothing to plan"
    return "no backward() ran inside of room.step(), so there is nothing to plan"
