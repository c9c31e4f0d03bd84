"""Keeps the plans of a room, one for each kind of step that recurs, and tells which kind is expected next."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from elbowroom.compilation import ENOUGH, LoopCompiler
from elbowroom.config import Config
from elbowroom.cost.price import correct, price
from elbowroom.errors import Infeasible
from elbowroom.hooks.input_guard import Inputs
from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import StepRecord
from elbowroom.ir.lease import Lease
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace, release_unneeded
from elbowroom.planner.plain import keep_all_if_it_fits
from elbowroom.planner.problem import plan as make_plan
from elbowroom.planner.problem import pose
from elbowroom.report.table import render_table
from elbowroom.runtime.candidate import Candidate
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.simulate import simulate

logger = logging.getLogger(__name__)

STEPS_THAT_SET_THE_PACE = 5
"""Planned steps that correct the forecast seconds of later ones."""

MOST_PLANS = 32
"""Kept at once; beyond, the one that was followed longest ago is forgotten."""

MOST_SEEN = 4096
"""Steps without a plan that are told apart, to see which of them recur."""

STEADY = 16
"""Steps in a row that were the expected one, after which no other is looked out for from the beginning."""


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """One kind of step: its trace, costs, plan and forecast, and where its copies will lie."""

    trace: Trace
    costs: Costs = dataclasses.field(repr=False)
    plan: Plan
    forecast: Forecast
    placement: Placement = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        plan, forecast = self.plan, self.forecast
        figures: dict[str, int | float | str] = {
            "ops": len(self.trace.ops),
            "strategy": plan.strategy,
            "budget_bytes": plan.budget_bytes,
            "offloaded_gaps": plan.count_gaps(Choice.OFFLOAD),
            "recomputed_gaps": plan.count_gaps(Choice.RECOMPUTE),
            "recomputed_segments": len(plan.segments),
            "forecast_peak_bytes": forecast.peak_bytes,
            "forecast_step_seconds": forecast.step_seconds,
            "recompute_seconds": forecast.recompute_seconds,
            "stall_seconds": forecast.stall_seconds,
            "offloaded_bytes": forecast.offloaded_bytes,
            "reloaded_bytes": forecast.reloaded_bytes,
        }
        return render_table(f"Elbowroom: {self.trace.name} on {self.trace.device}", figures)

    @property
    def is_plain(self) -> bool:
        """True if the plan moves nothing."""
        return not self.plan.decisions

    @functools.cached_property
    def candidate(self) -> Candidate:
        """Return the form in which a runner compares a step with this one."""
        return Candidate(self.trace, self.plan, self.placement)

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Bytes at the peak beyond those that are there before the step."""
        there = sum(home.nbytes for home in self.trace.storages if home.created < 0 and home.role is not Role.INPUT)
        return max(0, self.forecast.peak_bytes - there)


@dataclasses.dataclass(slots=True)
class PlanCacheEntry:
    """One kind of step with its plan, and measurements of the steps that were of this kind.

    Attributes:
        planned: the step and its plan.
        is_measured: whether its costs are those of a real step.
        measured_steps: steps that were watched so far to measure them.
        growth_bytes: the most that a plain step held beyond what was there before it.
        busy_seconds: of the steps that followed the present plan.
        calls: shapes that the model was called with, and how often in one step at most.
    """

    planned: PlannedStep
    is_measured: bool
    growth_bytes: int = 0
    measured_steps: int = 0
    busy_seconds: list[float] = dataclasses.field(default_factory=list)
    calls: Counter[Inputs] = dataclasses.field(default_factory=Counter)

    def is_usual(self, inputs: Inputs, count: int) -> bool:
        """Tell whether steps of this kind call the model with these shapes so often. True where no call was seen."""
        return not self.calls or count <= self.calls[inputs]

    def expect_growth(self) -> int:
        """Return the bytes that a step of this kind may hold beyond what is there before it."""
        return max(self.growth_bytes, self.planned.activation_bytes)


class PlanCache:
    """Plans steps, keeps the plans, and remembers which steps recur.

    Args:
        lease: what the job may hold.
        config, device: of the room.
        profile: of this machine.
        ledger: gives back the pages of free memory, since planning takes memory of its own.

    Attributes:
        lease: the one that holds now: as given, or as `set_budget` has replaced it.
        profile: as given.
        entries: most recently used first.
    """

    def __init__(
        self, lease: Lease, config: Config, device: torch.device, profile: HardwareProfile, ledger: Ledger
    ) -> None:
        self._config = config
        self._device = device
        self._ledger = ledger
        self.lease = lease
        self.profile = profile
        self.entries: list[PlanCacheEntry] = []
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._steady = STEADY
        self._loops = LoopCompiler(starts=config.mode != "dynamic")

    @property
    def current(self) -> PlanCacheEntry | None:
        """The entry of the step that is expected next."""
        return self.entries[0] if self.entries else None

    @property
    def varies(self) -> bool:
        """True if recent steps were of several kinds."""
        return self._steady < STEADY

    def close(self) -> None:
        """Plan no more steps."""
        self._loops.stop()

    # -- what steps were ------------------------------------------------------------------------------------------

    def record_hit(self, entry: PlanCacheEntry, calls: Counter[Inputs]) -> None:
        """Record that a step was of a known kind. `calls`: of the model in it."""
        entry.calls |= calls
        self._steady = self._steady + 1 if entry is self.entries[0] else 0
        self.entries.remove(entry)
        self.entries.insert(0, entry)

    def record_miss(self, sizes: Sequence[int]) -> bool:
        """Record that a step was of no known kind. Returns whether there was one like it before.

        Args:
            sizes: bytes of each storage that it saved.
        """
        self._steady = 0
        key = hash(tuple(sizes))
        count = self._seen.pop(key, 0) + 1
        self._seen[key] = count
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return count > 1

    def contains(self, trace: Trace) -> bool:
        """Tell whether there is a plan for steps that do just this."""
        return any(_tell_apart(entry.planned.trace) == _tell_apart(trace) for entry in self.entries)

    def remove(self, entry: PlanCacheEntry) -> None:
        """Forget an entry, if it is there: the next step of its kind is watched."""
        if entry in self.entries:
            self.entries.remove(entry)

    # -- planning -------------------------------------------------------------------------------------------------

    def add(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> None:
        """Plan a step, which is expected next.

        Raises:
            Infeasible: no plan fits the budget.
        """
        self._ledger.trim()
        costs = price(trace, self.profile, measurements, trace_digest=trace_digest)
        # What was measured beside a process that compiles is measured again.
        is_measured = measurements is not None and not self._loops.is_pending
        planned = self._plan(trace, costs)
        self.entries.insert(0, PlanCacheEntry(planned, is_measured=is_measured))
        del self.entries[MOST_PLANS:]

    def set_budget(self, nbytes: int) -> None:
        """Plan the step that is expected next for another budget, and forget the others until they recur.

        Raises:
            Infeasible: no plan fits it; nothing has changed.
        """
        before, self.lease = self.lease, self.lease.replace(nbytes)
        try:
            self.entries = [] if (entry := self.current) is None else self._plan_again(entry)
        except BaseException:
            self.lease = before
            raise

    def _plan_again(self, entry: PlanCacheEntry) -> list[PlanCacheEntry]:
        trace, costs = entry.planned.trace, entry.planned.costs
        self._ledger.trim()
        try:
            return [dataclasses.replace(entry, planned=self._plan(trace, costs), busy_seconds=[])]
        except Infeasible:
            if self.fits_without_plan(trace, costs.trace_digest, None):
                return []
            raise

    def fits_without_plan(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> bool:
        """Tell whether a step that no plan fits may run all the same, if a policy decides during the step. False if the
        user has chosen the strategy, which is then what does not fit."""
        if self._config.strategy != "auto":
            return False
        trace = release_unneeded(trace)
        costs = price(trace, self.profile, measurements, trace_digest=trace_digest)
        problem = pose(
            trace, costs, self.lease.device_bytes, min_offload_bytes=self._config.min_offload_bytes,
            host_bytes=self.lease.host_bytes,
        )  # fmt: skip
        return problem.floor.peak_bytes <= self.lease.device_bytes

    def replan(self, entry: PlanCacheEntry, measurements: Measurements) -> None:
        """Plan a step again, with measured costs of its ops.

        Raises:
            Infeasible: no plan fits the budget.
        """
        trace, digest = entry.planned.trace, entry.planned.costs.trace_digest
        entry.planned = self._plan(trace, price(trace, self.profile, measurements, trace_digest=digest))
        entry.is_measured = True
        entry.busy_seconds.clear()

    def calibrate_time(self, entry: PlanCacheEntry, record: StepRecord) -> None:
        """Correct the forecast seconds of later steps by those of the first planned ones."""
        entry.busy_seconds.append(record.seconds - record.stall_seconds)
        # The first one finds caches, allocator and spill file cold.
        if self._device.type != "cpu" or not 1 < len(entry.busy_seconds) <= STEPS_THAT_SET_THE_PACE + 1:
            return
        planned, forecast = entry.planned, entry.planned.forecast
        beyond = statistics.median(entry.busy_seconds[1:]) - (forecast.step_seconds - forecast.stall_seconds)
        costs = correct(planned.costs, beyond)
        forecast = simulate(
            planned.trace, costs, planned.plan, host_bytes=self.lease.host_bytes, placement=planned.placement
        )
        entry.planned = dataclasses.replace(planned, costs=costs, forecast=forecast)

    def _plan(self, trace: Trace, costs: Costs) -> PlannedStep:
        config = self._config
        plan = None
        if config.strategy == "auto":
            plan = keep_all_if_it_fits(trace, costs, self.lease.device_bytes)
        if plan is None:
            self._loops.wait(share=ENOUGH if config.strategy == "auto" else 1.0)
            plan = make_plan(
                trace, costs, self.lease.device_bytes, strategy=config.strategy,
                min_offload_bytes=config.min_offload_bytes, host_bytes=self.lease.host_bytes,
            )  # fmt: skip
        replay = PreparedTrace(trace, costs, host_bytes=self.lease.host_bytes)
        placement = replay.place(plan)
        planned = PlannedStep(trace, costs, plan, replay.run(plan, placement=placement), placement)
        self._ledger.trim()
        logger.info(
            "%s: forecast peak %d of %d bytes, %d decisions by %s",
            trace.name, planned.forecast.peak_bytes, self.lease.device_bytes, len(plan.decisions), plan.strategy
        )  # fmt: skip
        return planned


def _tell_apart(trace: Trace) -> tuple[object, ...]:
    return list_sizes(trace), [op.name for op in trace.ops if op.tick <= trace.needs[-1].tick]


def list_sizes(trace: Trace) -> list[int]:
    """Bytes of each save of a trace; 0 for what is no plain block of bytes."""
    return [trace.storages[save.storage].nbytes for save in trace.saves]
