"""A Room: one training job within one budget."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.config import Config
from elbowroom.cost.price import correct, price
from elbowroom.errors import TraceError, UsageError
from elbowroom.hardware.memory import cut_blocks_to_size, trim_allocator, tune_allocator
from elbowroom.hardware.probe import probe
from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.identity import Identities
from elbowroom.hooks.mark import is_marked, mark, unmark
from elbowroom.hooks.meter import Meter, make_meter
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.identity import digest
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.bounds import bound_plan
from elbowroom.planner.plain import EVERYTHING_FITS, keep_all_if_it_fits
from elbowroom.planner.problem import plan as make_plan
from elbowroom.report.summary import summarize
from elbowroom.residency.habits import Habits
from elbowroom.runtime.engine import Engine
from elbowroom.runtime.finishing import finishing
from elbowroom.runtime.logbook import Logbook
from elbowroom.runtime.online_engine import OnlineEngine
from elbowroom.runtime.open import open_transfers
from elbowroom.simulator.replay import simulate
from elbowroom.tracing.fake import capture_fake
from elbowroom.tracing.live import LiveCapture
from elbowroom.tracing.residents import list_residents
from elbowroom.tracing.tracer import telling_gradients

logger = logging.getLogger(__name__)

DRIFTS_BEFORE_RECAPTURE = 2
"""One odd step (the last batch of an epoch) is no reason to plan anew; two in a row are."""

STEPS_THAT_SET_THE_PACE = 5
"""How many planned steps correct the forecast of the seconds of those to come."""

MOST_STEPS_BETWEEN_CAPTURES = 64
"""Where steps cannot be planned, how long at most until the next one is captured to see whether that has changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A step that is known: its trace, what it costs, and what will be done about it."""

    trace: Trace
    costs: Costs
    plan: Plan
    forecast: Forecast


class Room:
    """Fits the training steps of one model into a number of bytes. Made by `elbowroom.fit`.

    Attributes:
        budget_bytes: what the job may hold on its device.
        planned: what is known of the step and decided about it; None until a step has been captured.
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
        self.planned: Planned | None = None
        self._model, self._optimizers, self._device = model, tuple(optimizers), device
        self._name = type(model).__name__
        self._profile = profile
        self._detached = True  # until there is something to detach
        self._logbook = Logbook()
        self._captures = self._drifts = self._measured_steps = 0
        self._busy_seconds: list[float] = []  # of the steps that followed the present plan
        self._engine: Engine | None = None
        self._estimates, self._habits = Estimates(device.type), Habits()
        self._inside = self._measured = self._metered = self._blind = self._has_refused = False
        self._futile_captures = self._next_capture = 0
        self._transfers = open_transfers(device, config.spill_folder, config.host_bytes)
        try:
            if step is not None and config.mode != "dynamic":
                self._plan_ahead(step)
        except BaseException:
            self._transfers.close()
            raise
        if device.type == "cpu":
            tune_allocator(release_pages=config.release_pages)
        else:
            cut_blocks_to_size()
        mark(model)
        self._detached = False

    # -- what the user calls --------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step within the budget: its forward passes, backward passes and optimizer.

        Raises:
            UsageError: inside another step, or after `detach`.
            Infeasible: when the step has been seen and no plan fits the budget; the step itself has been carried out.
            TierFull, TransferFailed: a move failed and there is no room to do without it.
        """
        if self._detached:
            raise UsageError("this room is detached; call elbowroom.fit again")
        if self._inside:
            raise UsageError("room.step() inside room.step(): one `with room.step():` is one whole training step")
        self._inside = True
        try:
            if self.config.mode == "dynamic":
                yield from self._run_dynamic()
            elif self.planned is not None and self.planned.plan.strategy == EVERYTHING_FITS:
                yield from self._run_plain(self.planned)
            elif self.planned is not None and self._drifts < (DRIFTS_BEFORE_RECAPTURE if self._measured else 1):
                yield from self._run_planned(self.planned)
            else:
                yield from self._run_capacity_first()
        finally:
            self._inside = False

    def journal(self) -> Journal:
        """What was measured so far."""
        return self._logbook.journal()

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
        self._detached = True
        self._engine = None
        unmark(self._model)
        self._transfers.close()

    def __del__(self) -> None:
        if not getattr(self, "_detached", True):
            self.detach()  # forgotten: whoever has no room any more cannot detach it

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # -- running a step -------------------------------------------------------------------------------------------

    def _run_plain(self, planned: Planned) -> Iterator[None]:
        # That everything fits may so far be an estimate, and stops being true where later steps are larger.
        meter = make_meter(self._device) if not self._measured or self._is_metered() else None
        seconds = yield from self._run(None, meter, None)
        record = self._record(Mode.PLAIN, seconds, None, meter, "")
        self._keep_pace(planned, record)
        if meter is not None:
            self._measured_steps += 1
            self._measured = self._measured_steps >= self.config.settling_steps
            if record.peak_bytes > self.budget_bytes:
                self.planned = None

    def _run_planned(self, planned: Planned) -> Iterator[None]:
        # The first steps after planning ahead of any run are watched op by op, to learn what ops really cost.
        measuring = not self._measured and self._measured_steps < self.config.settling_steps
        meter = make_meter(self._device) if measuring or self._is_metered() else None
        capture = self._make_capture(meter) if measuring and meter is not None else None
        engine = self._make_engine(planned, capture)
        seconds = yield from self._run(engine, meter, capture)
        self._drifts = self._drifts + 1 if engine.drift else 0
        record = self._record(Mode.DRIFTED if engine.drift else Mode.PLANNED, seconds, engine, meter, engine.drift)
        if capture is not None:
            self._measured_steps += 1
            self._learn(planned, capture, record)
        elif not engine.drift:
            self._keep_pace(planned, record)

    def _run_dynamic(self) -> Iterator[None]:
        meter = make_meter(self._device) if self._is_metered() else None
        engine = self._make_online_engine()
        seconds = yield from self._run(engine, meter, None)
        self._record(Mode.DYNAMIC, seconds, engine, meter, "")

    def _run_capacity_first(self) -> Iterator[None]:
        meter = make_meter(self._device) if self._logbook.count >= self._next_capture else None
        capture = None if meter is None else self._make_capture(meter)
        engine = self._make_engine(None, capture)
        seconds = yield from self._run(engine, meter, capture)
        if capture is None or not engine.needs:
            note = "" if engine.needs else "no backward() ran inside of room.step(), so there is nothing to plan"
            self._record(Mode.UNPLANNED, seconds, engine, meter, note)
            if capture is not None:
                self._put_off_capture(note)
            return
        record = self._record(Mode.CAPTURE, seconds, engine, meter, "")
        self._drifts = self._futile_captures = 0
        self._adopt(capture, record, is_whole=not engine.refusal)

    def _put_off_capture(self, why: str) -> None:
        """A step that cannot be planned has been captured: later ones may differ, but not all of them pay for that."""
        if not self._futile_captures:
            logger.warning("step %d: %s", self._logbook.count - 1, why)
        self._next_capture = self._logbook.count - 1 + min(2**self._futile_captures, MOST_STEPS_BETWEEN_CAPTURES)
        self._futile_captures += 1

    def _run(
        self, engine: Engine | None, meter: Meter | None, capture: LiveCapture | None
    ) -> Generator[None, None, float]:
        """Let the block run, and say how many seconds it took."""
        self._engine = engine
        with contextlib.ExitStack() as stack:
            self._start(meter, stack)
            if engine is not None and engine.watcher is not None:
                stack.enter_context(engine.watcher)
            if capture is not None:
                stack.enter_context(capture.tracer)
                stack.enter_context(telling_gradients(capture.tracer, self._model))
            if engine is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack))
                stack.enter_context(finishing(engine.finish))
            begin = time.perf_counter()
            yield
            return time.perf_counter() - begin

    def _make_capture(self, meter: Meter) -> LiveCapture:
        def written(tensor: torch.Tensor) -> None:
            if self._engine is not None:
                self._engine.written(tensor)

        return LiveCapture(self._name, self._device, self._model, self._optimizers, meter, written)

    def _make_engine(self, planned: Planned | None, capture: LiveCapture | None) -> Engine:
        trace, plan = (None, None) if planned is None else (planned.trace, planned.plan)
        spare_bytes = None if planned is None else self.budget_bytes - planned.forecast.peak_bytes
        return Engine(
            self._transfers, self._device, self._list_staying, self.config.min_offload_bytes, trace=trace, plan=plan,
            spare_bytes=spare_bytes, observer=None if capture is None else capture.tracer,
        )  # fmt: skip

    def _make_online_engine(self) -> OnlineEngine:
        there = [tensor for tensor, _, _ in list_residents(self._model, self._optimizers)]
        return OnlineEngine(
            self._transfers, self._device, self._list_staying, self.config.min_offload_bytes,
            budget_bytes=self.budget_bytes, policy=self.config.policy, estimates=self._estimates,
            profile=self._find_profile(), habits=self._habits, residents=there,
        )  # fmt: skip

    def _list_staying(self) -> Identities[bool]:
        """The storages that outlive the step; of those that die all the same, the addresses mean nothing."""
        staying: Identities[bool] = Identities()
        for tensor, _, _ in list_residents(self._model, self._optimizers):
            if tensor.layout is torch.strided:
                staying.put(tensor.untyped_storage(), True)
        return staying

    def _start(self, meter: Meter | None, stack: contextlib.ExitStack) -> None:
        """Let a meter count until the stack unwinds."""
        if meter is not None:
            # What was made in a step that was not metered is freed unseen: gradients, where a step begins with them.
            self._blind = (
                not self._metered
                and self._device.type == "cpu"
                and any(each.grad is not None for each in self._model.parameters())
            )
            storages = () if self.planned is None else self.planned.trace.storages
            inputs = sum(storage.nbytes for storage in storages if storage.created < 0 and storage.role is Role.INPUT)
            meter.start((tensor for tensor, _, _ in list_residents(self._model, self._optimizers)), inputs)
            stack.callback(meter.stop)

    def _is_metered(self) -> bool:
        every = self.config.meter_every
        # One in so many, and the one before it, without which it might be blind to what it frees.
        return every > 0 and (self._logbook.settled_steps < 2 or (self._logbook.count + 1) % every < 2)

    def _record(self, mode: Mode, seconds: float, engine: Engine | None, meter: Meter | None, note: str) -> StepRecord:
        transfers = self._transfers
        record = StepRecord(
            step=self._logbook.count,
            mode=mode,
            seconds=seconds,
            stall_seconds=transfers.stall_seconds,
            peak_bytes=0 if meter is None or self._blind else meter.peak_bytes,
            resident_bytes=0 if meter is None else meter.resident_bytes,
            offloaded_bytes=transfers.offloaded_bytes,
            reloaded_bytes=transfers.reloaded_bytes,
            recomputed=0 if engine is None else engine.recomputed,
            saves=0 if engine is None else engine.saves,
            needs=0 if engine is None else engine.needs,
            note=note or ("" if engine is None else engine.refusal),
        )
        transfers.stall_seconds = transfers.offloaded_bytes = transfers.reloaded_bytes = 0
        if engine is not None and engine.refusal and not self._has_refused:
            self._has_refused = True
            logger.warning("what should leave the device stays there, as far as there is room: %s", engine.refusal)
        self._metered = meter is not None
        self._logbook.add(record)
        return record

    # -- planning -------------------------------------------------------------------------------------------------

    def _plan_ahead(self, step: Callable[[], Any]) -> None:
        try:
            trace = capture_fake(step, self._model, self._optimizers, name=self._name, device=self._device)
        except TraceError as error:
            logger.warning("%s", error)
            return
        self._decide(trace, digest(trace), None)

    def _adopt(self, capture: LiveCapture, record: StepRecord, is_whole: bool) -> None:
        """Plan what has just been captured, unless it is not yet what later steps will be.

        `is_whole`: whether all that may leave did: of what stayed, nobody knows how long the program itself held it.
        """
        self._captures += 1
        trace = capture.finish()
        if not (capture.is_settled and is_whole) and self._captures < self.config.settling_steps:
            return
        self._captures = 0
        self._measured = True
        self._decide(trace, digest(trace), capture.measure(trace, record.seconds, record.stall_seconds))

    def _learn(self, planned: Planned, capture: LiveCapture, record: StepRecord) -> None:
        """Plan again with measured op times, if the watched step was the planned one to the last op."""
        expected = [op.name for op in planned.trace.ops]
        # What the block does after the step that was captured (noting its loss, say) changes nothing.
        if [op.name for op in capture.finish().ops[: len(expected)]] != expected:
            if self._measured_steps == self.config.settling_steps:
                self.planned = None  # the real step is not what the fake one was: capture it live
            return
        self._measured = True
        measurements = capture.measure(planned.trace, record.seconds, record.stall_seconds)
        self._decide(planned.trace, planned.costs.trace_digest, measurements)

    def _keep_pace(self, planned: Planned, record: StepRecord) -> None:
        """Let the forecast of later steps begin from what planned ones took: a step that is watched takes longer."""
        self._busy_seconds.append(record.seconds - record.stall_seconds)
        # The first one finds caches, allocator and spill file cold.
        if self._device.type != "cpu" or not 1 < len(self._busy_seconds) <= STEPS_THAT_SET_THE_PACE + 1:
            return
        forecast = planned.forecast
        beyond = statistics.median(self._busy_seconds[1:]) - (forecast.step_seconds - forecast.stall_seconds)
        costs = correct(planned.costs, beyond)
        forecast = simulate(planned.trace, costs, planned.plan, host_bytes=self.config.host_bytes)
        self.planned = dataclasses.replace(planned, costs=costs, forecast=forecast)

    def _find_profile(self) -> HardwareProfile:
        if self._profile is None:
            self._profile = probe(str(self._device), spill_folder=self.config.spill_folder)
        return self._profile

    def _decide(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> None:
        costs = price(trace, self._find_profile(), measurements, trace_digest=trace_digest)
        plan = None
        if self.config.strategy == "auto":
            plan = keep_all_if_it_fits(trace, costs, self.budget_bytes)
        if plan is None:
            plan = make_plan(
                trace, costs, self.budget_bytes, strategy=self.config.strategy,
                min_offload_bytes=self.config.min_offload_bytes, host_bytes=self.config.host_bytes,
            )  # fmt: skip
        self.planned = Planned(trace, costs, plan, simulate(trace, costs, plan, host_bytes=self.config.host_bytes))
        self._busy_seconds.clear()
        if self._device.type == "cpu":
            trim_allocator()  # what the steps so far took, planned ones will not take again
        logger.info(
            "%s: forecast peak %d of %d bytes, %d decisions by %s",
            trace.name, self.planned.forecast.peak_bytes, self.budget_bytes, len(plan.decisions), plan.strategy
        )  # fmt: skip
