"""Room: one training job within one budget."""

from __future__ import annotations

import contextlib
import logging
import os
import reprlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.advice import advise
from elbowroom.agreed_plans import AgreedPlans
from elbowroom.config import Config
from elbowroom.errors import Infeasible, UsageError
from elbowroom.hardware.memory import cut_blocks_to_size, parse_budget
from elbowroom.hooks.attachment import attach_mark, is_marked, remove_mark
from elbowroom.hooks.exposed_memory import note_exposures
from elbowroom.hooks.ledgers import make_ledger
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Journal
from elbowroom.ir.learned import from_state, to_state
from elbowroom.ir.lease import Lease
from elbowroom.job import Job
from elbowroom.metering import Metering
from elbowroom.plan_cache import PlanCache
from elbowroom.planned_step import PlannedStep
from elbowroom.planner.bounds.bound import bound_plan
from elbowroom.report.state import StateClass, count_state
from elbowroom.report.summary import summarize
from elbowroom.report.table import render_table
from elbowroom.room_setup import change_budget, join_job, make_pager, plan_ahead, probe_within
from elbowroom.run_files import save_run
from elbowroom.runtime.factory import open_transfers
from elbowroom.runtime.sliced_ops import SlicedOps
from elbowroom.shared_lease import SharedLease
from elbowroom.step_boundaries import StepBoundaries
from elbowroom.step_modes import StepModes
from elbowroom.step_planner import StepPlanner
from elbowroom.tracing.residents import list_attribute_tensors
from elbowroom.units import format_bytes, format_seconds

logger = logging.getLogger(__name__)


class Room:
    """Runs the training steps of one model within a byte budget. Made by `elbowroom.fit`."""

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
        shared: SharedLease | None = None,
        finds_steps: bool = False,
    ) -> None:
        if is_marked(model):
            raise UsageError("this model already has a room; call its detach() first")
        note_exposures()
        self.config = config
        self._job = job = Job(model, tuple(optimizers), device, config)
        self._title = f"{reprlib.repr(job.name)} on {device}"
        self._ledger = make_ledger(device)
        self._detached = True  # until construction succeeds
        with contextlib.ExitStack() as undoing:
            undoing.callback(self._ledger.close)
            ranks = join_job(job, self._ledger, budget_bytes, is_alone=shared is not None)
            if ranks is not None:
                undoing.push(ranks.leave)
                budget_bytes = ranks.budget_bytes
            profile = profile or probe_within(job, self._ledger, budget_bytes)
            lease = Lease(device_bytes=budget_bytes, host_bytes=config.host_bytes)
            self._cache = PlanCache(lease, planner := StepPlanner(config, device, profile, self._ledger))
            undoing.callback(planner.close)
            self._transfers = open_transfers(device, config.spill_folder, lease.host_bytes)
            undoing.callback(self._transfers.close)
            self._metering = Metering(device, self._transfers, self._ledger)
            self._pager = make_pager(job, self._transfers, self._ledger)
            shared = shared and shared.attach(config, self._ledger, self._pager)
            sliced_ops = SlicedOps(self._pager, self._ledger, config.exact, config.spill_folder, self._metering.sliced)
            agreed = None if ranks is None else AgreedPlans(ranks, self._cache, config)
            self._modes = StepModes(
                job, self._cache, self._metering, self._transfers, self._ledger, self._pager, sliced_ops, agreed
            )
            undoing.callback(self._modes.close)
            self._steps = StepBoundaries(self._modes, shared, weakref.proxy(self))
            self._ledger.adopt([*job.list_residents(), *list_attribute_tensors(job.model, device)])
            if step is not None and config.mode != "dynamic":
                plan_ahead(job, self._pager, self._modes.captured, budget_bytes, step)
            if finds_steps:
                self._steps.find(model, job.optimizers)
            undoing.pop_all()
        if device.type == "cuda":
            cut_blocks_to_size()
        attach_mark(model)
        self._detached = False

    @property
    def budget_bytes(self) -> int:
        """Budget of the job on its device, in bytes."""
        return self._cache.lease.device_bytes

    @property
    def profile(self) -> HardwareProfile:
        """Profile of this machine that steps are planned with."""
        return self._cache.planner.profile

    @property
    def was_refused(self) -> bool:
        """True if the running or last step was refused memory, so that the program got an `Infeasible`."""
        return not self._detached and self._steps.was_refused

    @property
    def planned(self) -> PlannedStep | None:
        """The step that is expected next, with its plan; None until a step has been planned."""
        return None if (current := self._cache.current) is None else current.planned

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step within the budget: its forward passes, backward passes and optimizer.

        Raises:
            UsageError: inside another step, or after `detach`.
            BrokerLost: with memory_budget="shared" and without_broker="stop", before the step.
            Infeasible: before an op whose working set exceeds the budget even if everything movable leaves; or at the
                end of the first steps, which have run, if no plan fits.
            MemoryRefused: the system refuses memory within the budget, and nothing more can leave.
            TierFull, TransferFailed: a move failed, and without it there is not enough memory.
        """
        self.begin_step()
        try:
            yield
            if not self._detached and self._steps.is_inside:  # otherwise `detach` has ended it
                self._steps.end_step()
        except BaseException as error:  # of the program, or an interrupt as the step ends
            if not self._detached and self._steps.is_inside:
                self._steps.end_step(error)
            raise

    def begin_step(self) -> None:
        """Begin a training step where `with room.step():` does not fit, such as in the callbacks of a trainer.

        Raises:
            UsageError: inside another step, or after `detach`.
        """
        _require_attached(self)
        self._steps.stop_finding()
        self._steps.begin_step()

    def end_step(self, error: BaseException | None = None) -> None:
        """End the step that `begin_step` began, in the same thread.

        Args:
            error: the exception that aborted the step, if any. It is not raised again.

        Raises:
            UsageError: no step has begun, or another thread began it.
            Infeasible, MemoryRefused, TierFull, TransferFailed: as for `step`.
        """
        _require_attached(self)
        self._steps.end_step(error)

    def set_budget(self, memory_budget: int | float | str) -> None:
        """Change the budget from the next step on. That step is replanned now; other kinds of step when they recur.
        In a distributed job all ranks call it together, and get the smallest budget that one asks for.

        Args:
            memory_budget: as for `elbowroom.fit`.

        Raises:
            UsageError: the budget is malformed, a step is running, the budget is a lease, or the room is detached.
            Infeasible: the job already holds more, or neither a plan of the next step fits nor slices are known to. The
                old budget stays in force.
        """
        _require_attached(self)
        if (shared := self._steps.shared) is not None:
            shared.check_change()
        self._steps.abort_found()
        if self._steps.is_inside:
            raise UsageError("set_budget() inside a step: call it between steps")
        budget_bytes = parse_budget(memory_budget, self._job.device)
        if self._job.moves_state and (held_bytes := self._ledger.live_bytes) > budget_bytes:
            self._pager.make_room_between_steps(held_bytes - budget_bytes)
        try:
            held_bytes, away_bytes = self._ledger.live_bytes, self._pager.count_away()
            change_budget(self._cache, self._modes.agreed, self._job, held_bytes, away_bytes, budget_bytes)
        except Infeasible as error:
            advise(error, self._job.model, self._job.optimizers, moves_state=self._job.moves_state)
            raise
        self._modes.schedule.begin_anew()
        self._ledger.trim()

    def state_dict(self) -> dict[str, Any]:
        """Return what the room has learned, for a checkpoint: its plans, and the op times of this machine.

        Returns:
            Numbers, strings, lists and dicts, which `torch.save` and `json.dump` write. Some 600 bytes an op.
        """
        return to_state(self._cache.list_learned())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what a room has learned in an earlier run, so that the first step already follows its plan.

        On another machine, or with another budget, the same steps are planned anew. A step of another model, or of one
        that is sharded over other ranks, is learned anew.

        Args:
            state: from `state_dict`. One of another version of Elbowroom's formats is ignored, with a warning.

        Raises:
            UsageError: a step is running, or the room is detached.
            TraceError: the state is corrupt; names the place.
        """
        _require_attached(self)
        self._steps.abort_found()
        if self._steps.is_inside:
            raise UsageError("load_state_dict() inside a step: call it between steps")
        if (learned := from_state(state)) is not None and self.config.mode != "dynamic":
            self._cache.adopt_learned(learned, self._job.count_parameters())

    def count_also(self, tensors: Iterable[torch.Tensor], former: Room | None = None) -> None:
        """Count tensors from before `fit` toward the budget that are neither the model's nor the optimizers'.

        On CUDA they are counted anyway.

        Args:
            former: a detached room. What it has counted, or would have since, and is still there counts as well.

        Raises:
            UsageError: the room is detached.
        """
        _require_attached(self)
        self._ledger.adopt(tensors)
        if former is not None and (scope := former._ledger.scope) is not None and self._ledger.scope is not None:
            self._ledger.scope.inherit(scope)

    def move_state_out(self) -> int:
        """Move parameters, gradients, buffers and optimizer state out of memory until the next step, as far as they can
        leave. Return the bytes that stay.

        Raises:
            UsageError: the room is detached.
        """
        _require_attached(self)
        if self._job.moves_state:
            self._pager.make_room_between_steps(self._ledger.live_bytes)
        self._ledger.trim()
        return self._ledger.live_bytes

    def journal(self) -> Journal:
        """Return the measurements so far."""
        return self._metering.journal()

    def metrics(self) -> dict[str, int | float | str]:
        """Return metrics of the last step and of all steps so far, for a logger such as wandb, TensorBoard or MLflow.

        Keys without a known value are omitted, so no value is None. Only "mode" is a string. Takes a few microseconds.

        Returns:
            Always budget_bytes: the budget on the device. Once a step has been planned, of the one expected next also
            forecast_step_seconds and forecast_peak_bytes: predicted by the simulator.

            Once a step has ended; of the last one:

            - step: number of the step, from 0.
            - mode: "capture", "planned", "plain", "dynamic" or "drifted", as in `Mode`.
            - step_seconds: wall time.
            - stall_seconds: part of it spent waiting for transfers.
            - peak_bytes: peak tensor bytes on the device; omitted if the step was not metered.
            - resident_bytes: peak resident memory of the process (CPU), or peak memory reserved by the allocator
              (CUDA); omitted if the step was not metered.
            - offloaded_bytes, reloaded_bytes: moved each way.
            - recomputed_segments: segments replayed.

            And of all steps:

            - sliced_ops: how many ops have run in slices; omitted if none has.
            - max_peak_bytes: highest peak of all metered steps; omitted if no step was metered.
            - total_step_seconds, total_stall_seconds, total_offloaded_bytes, total_reloaded_bytes,
              total_recomputed_segments: sums of the above.
            - capture_steps, planned_steps, plain_steps, dynamic_steps, drifted_steps: steps in each mode.
        """
        found = {"budget_bytes": self.budget_bytes, **self._metering.metrics()}
        if (planned := self.planned) is not None:
            found["forecast_step_seconds"] = planned.forecast.step_seconds
            found["forecast_peak_bytes"] = planned.forecast.peak_bytes
        return found

    def __repr__(self) -> str:
        if "_metering" not in vars(self):
            return "<Room: not made>"  # a debugger may show it after a failed constructor
        found = self.metrics()
        text = f"{self._title} within {format_bytes(self.budget_bytes)}"
        if self._detached:
            text += ", detached"
        if "step" not in found:
            return f"<Room: {text}; no step yet>"
        text += f"; step {found['step']} ({found['mode']}) took {format_seconds(float(found['step_seconds']))}"
        if "max_peak_bytes" in found:
            text += f", max peak {format_bytes(int(found['max_peak_bytes']))}"
        return f"<Room: {text}>"

    def _repr_html_(self) -> str:
        figures = {name: figure for name, figure in self.metrics().items() if figure or name == "step"}
        return render_table(f"Elbowroom: {self._title}", figures)

    def report(self, *, by: str = "kind", depth: int | None = None) -> str:
        """Return a text report: forecast, measurements, and why each block is where it is at the peak.

        Args:
            by: "kind" groups blocks by kind; "module" counts bytes by module.
            depth: levels of modules shown with by="module"; None for as many as fit.

        Raises:
            UsageError: there is no such table, or the depth is invalid.
        """
        forecast: dict[str, Any] = {}
        if (planned := self.planned) is not None:
            host_bytes = self._cache.lease.host_bytes
            forecast = {
                "trace": planned.trace, "costs": planned.costs, "plan": planned.plan, "forecast": planned.forecast,
                "bound_seconds": bound_plan(planned.trace, planned.costs, planned.plan, host_bytes),
                "host_bytes": host_bytes,
            }  # fmt: skip
        return summarize(
            budget_bytes=self.budget_bytes, journal=self.journal(), manages=self.config.manages, by=by, depth=depth,
            sliced=self._metering.sliced.counts, inexact=self._metering.sliced.inexact, **forecast,
        )  # fmt: skip

    def save_run(self, path: str | os.PathLike[str]) -> None:
        """Write the journal, and the step that is expected next with its plan, for `elbowroom view` and `report`.

        Raises:
            UsageError: the file cannot be written.
        """
        save_run(path, self.journal(), self._cache)

    def count_state(self) -> tuple[StateClass, ...]:
        """Return the model's state by class: where it is at the forecast peak, and the seconds that moving it takes.

        Empty until a step has been planned.
        """
        planned = self.planned
        if planned is None:
            return ()
        return count_state(planned.trace, planned.costs, planned.plan, planned.forecast, self._cache.lease.host_bytes)

    def detach(self) -> None:
        """Remove the room from the model. Graphs that are still alive can still run their backward pass.

        A running step of this thread is aborted. What the room has learned and measured stays; the model does not.

        Raises:
            TierError: model state that is away cannot be read back.
        """
        if self._detached:
            return
        self._steps.close()
        self._modes.close()
        self._pager.close()
        if self._modes.agreed is not None:
            self._modes.agreed.close()
        remove_mark(self._job.model)
        self._cache.planner.close()
        self._transfers.close()
        self._ledger.close()
        if (shared := self._steps.shared) is not None:
            shared.close(self._job.list_residents())
        self._detached = True  # last, so that an interrupted call can be repeated
        del self._job, self._pager, self._modes, self._steps

    def __del__(self) -> None:
        if getattr(self, "_detached", True) or sys.is_finalizing():  # modules may be gone, and the memory goes anyway
            return
        if not self._steps.has_begun:
            logger.warning("a room was dropped before its first step: keep what elbowroom.fit returns while you train")
        self.detach()

    def __enter__(self) -> Room:
        _require_attached(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def _require_attached(room: Room) -> None:
    if room._detached:
        raise UsageError("this room is detached; call elbowroom.fit again")
