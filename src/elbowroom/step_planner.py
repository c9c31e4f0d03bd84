"""StepPlanner: makes the plans of a room's steps."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import torch

from elbowroom.compilation import ENOUGH, LoopCompiler
from elbowroom.config import Config
from elbowroom.cost.price import price
from elbowroom.errors import Infeasible
from elbowroom.hardware.past_times import PastTimes
from elbowroom.hooks.ledger import Ledger
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.learned import PlanningOptions
from elbowroom.ir.lease import Lease
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace, release_unneeded
from elbowroom.planned_step import PlannedStep, forecast_plan
from elbowroom.planner.interruption import passing_interruptions
from elbowroom.planner.optimizer_parts import find_peak_beside_updates
from elbowroom.planner.options import Manages, find_managed
from elbowroom.planner.plain import keep_all_if_it_fits
from elbowroom.planner.problem import fit_slices, pose
from elbowroom.planner.problem import plan as make_plan
from elbowroom.planner.slicing.choice import Slices
from elbowroom.planner.slicing.least_bytes import find_largest_need
from elbowroom.planning_times import BRIEF, LEVELS, QUICK, SEARCH, PlanningTimes
from elbowroom.units import format_bytes

logger = logging.getLogger(__name__)

KEEPS_STATE = (
    'Plans of strategy="{}" keep parameters, gradients and optimizer state on the device; "auto" can move them.'
)

MAY_RUN_ANEW = (
    "Ops in slices may have room, which is not known in advance: room.detach() and a new fit with this budget find out."
)

STAGES = {SEARCH: ENOUGH, BRIEF: ENOUGH, QUICK: 0.0}
"""Share of the stages of compiling to wait for before a strategy plans; all for others. The quick one has few loops."""


class StepPlanner:
    """Prices and plans steps as a room's options say.

    Args:
        config, device: of the room.
        profile: of this machine.
        ledger: returns the pages of free memory to the system, since planning itself takes memory.

    Attributes:
        config, device, profile: as given.
        past: op times that this machine measured before.
        times: how long planning takes.
    """

    def __init__(self, config: Config, device: torch.device, profile: HardwareProfile, ledger: Ledger) -> None:
        self.config = config
        self.device = device
        self.profile = profile
        self.past = PastTimes(profile, is_enabled=config.op_time_store)
        self.times = PlanningTimes(config.strategy)
        self._ledger = ledger
        self._loops = LoopCompiler(starts=config.mode != "dynamic")

    def close(self) -> None:
        """Plan no more steps."""
        self._loops.stop()

    @property
    def is_beside_compiler(self) -> bool:
        """True while a process compiles loops for the planner, beside which ops take longer."""
        return self._loops.is_pending

    def describe(self, lease: Lease) -> PlanningOptions:
        """Return the limits and options of plans."""
        config = self.config
        return PlanningOptions(
            lease.device_bytes, lease.host_bytes, config.strategy, config.manages, config.min_offload_bytes
        )

    def price(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> Costs:
        """Return the costs of a step on this machine."""
        past = self.past.load() if measurements is None else None
        return price(trace, self.profile, measurements, trace_digest=trace_digest, past=past)

    def plan(
        self, trace: Trace, costs: Costs, lease: Lease, *, first: str = SEARCH, climbs: bool = False
    ) -> PlannedStep:
        """Return a step with a plan for the limits of a lease.

        Args:
            first: level of `planning_times` that plans first for the default strategy; if it finds no plan, the next.
            climbs: whether the next level plans as well if that is worth its time.

        Raises:
            Infeasible: no plan fits.
        """
        self._ledger.trim()
        with passing_interruptions():
            plan = self._choose_plan(trace, costs, lease, first, climbs=climbs)
            planned = forecast_plan(trace, costs, plan, lease.host_bytes)
        self._ledger.trim()
        logger.info(
            "%s: forecast peak %d of %d bytes, %d decisions by %s",
            trace.name, planned.forecast.peak_bytes, lease.device_bytes, len(plan.decisions), plan.strategy
        )  # fmt: skip
        return planned

    def find_obstacle(
        self,
        trace: Trace,
        trace_digest: str,
        measurements: Measurements | None,
        lease: Lease,
        *,
        regroups: bool = False,
        is_running: bool = False,
    ) -> str | None:
        """Return None if a step that no plan fits may run under a policy; else what to add to the error.

        It may not begin to if the user has chosen the strategy, which adds nothing.

        Args:
            regroups: whether optimizers update fewer parameters at a time if they have to.
            is_running: whether the job runs within another budget. Slices must be known to fit then, as a step that is
                refused may end in the middle of an update.
        """
        config = self.config
        if config.strategy != "auto" and (not is_running or lease.host_bytes is not None):
            return ""
        trace = release_unneeded(trace)
        manages = Manages(config.manages)
        costs = self.price(trace, trace_digest, measurements)
        problem = pose(
            trace, costs, lease.device_bytes, min_offload_bytes=config.min_offload_bytes,
            host_bytes=lease.host_bytes, manages=manages,
        )  # fmt: skip
        floor_bytes = find_peak_beside_updates(trace, problem.floor) if regroups else problem.floor.peak_bytes
        slices = Slices.EXACT if config.exact else Slices.ANY
        if floor_bytes <= lease.device_bytes or (is_running and fit_slices(problem, slices) is not None):
            return None
        op, nbytes = find_largest_need(trace, manages, slices)
        if nbytes <= lease.device_bytes:
            return MAY_RUN_ANEW if is_running else None
        return f"If ops run in slices, at least {format_bytes(nbytes)} ({nbytes} bytes) are needed, when {op} runs."

    def _choose_plan(self, trace: Trace, costs: Costs, lease: Lease, first: str, *, climbs: bool) -> Plan:
        strategy = self.config.strategy
        if strategy != SEARCH:
            try:
                return self._make_plan(trace, costs, lease, strategy)
            except Infeasible as error:
                if find_managed(strategy, self.config.manages) != self.config.manages:
                    error.add(KEEPS_STATE.format(strategy))
                raise
        if (plan := keep_all_if_it_fits(trace, costs, lease.device_bytes)) is not None:
            return plan
        for level, better in itertools.pairwise(LEVELS[LEVELS.index(first) :]):
            try:
                plan = self._make_plan(trace, costs, lease, level)
            except Infeasible:
                continue
            if not (climbs and self.times.is_worth_its_time(better, costs.plain_seconds)):
                return dataclasses.replace(plan, strategy=level)
        return self._make_plan(trace, costs, lease, SEARCH)

    def _make_plan(self, trace: Trace, costs: Costs, lease: Lease, strategy: str) -> Plan:
        config = self.config
        self._loops.wait(share=STAGES.get(strategy, 1.0))
        with self.times.measure(strategy):
            return make_plan(
                trace, costs, lease.device_bytes, strategy=strategy, min_offload_bytes=config.min_offload_bytes,
                host_bytes=lease.host_bytes, manages=config.manages, slices=Slices.NONE,
            )  # fmt: skip
