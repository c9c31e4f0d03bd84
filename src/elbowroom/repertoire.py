"""The steps that a room knows, each with its plan, and which of them is to be expected next."""

from __future__ import annotations

import dataclasses
import functools
import logging
import statistics
from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from elbowroom._compiled import IS_COMPILED, is_kept
from elbowroom.config import Config
from elbowroom.cost.price import correct, price
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.sentry import Inputs
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import StepRecord
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Role, Trace, release_unneeded
from elbowroom.planner.plain import keep_all_if_it_fits
from elbowroom.planner.problem import plan as make_plan
from elbowroom.planner.problem import pose
from elbowroom.runtime.known import Known
from elbowroom.simulator.replay import Replay, simulate

logger = logging.getLogger(__name__)

STEPS_THAT_SET_THE_PACE = 5
"""How many planned steps correct the forecast of the seconds of those to come."""

MOST_PLANS = 32
"""Kept at once; beyond, the one that was followed longest ago is forgotten."""

MOST_SEEN = 4096
"""Steps without a plan that are told apart, to see which of them recur."""

STEADY = 16
"""Steps in a row that were the expected one, after which no other is looked out for from the beginning."""


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step that is known: its trace, what it costs, what will be done about it, and where its copies will lie."""

    trace: Trace
    costs: Costs
    plan: Plan
    forecast: Forecast
    placement: Placement

    @property
    def is_plain(self) -> bool:
        """Whether nothing has to be done at all."""
        return not self.plan.decisions

    @functools.cached_property
    def known(self) -> Known:
        """Return what a step that may be this one is compared with."""
        return Known(self.trace, self.plan, self.placement)

    def count_activations(self) -> int:
        """Bytes at the peak beyond what is there before the step."""
        there = sum(home.nbytes for home in self.trace.storages if home.created < 0 and home.role is not Role.INPUT)
        return max(0, self.forecast.peak_bytes - there)


@dataclasses.dataclass(slots=True)
class Act:
    """A step that is known, and what was learnt of it since.

    Attributes:
        planned: what is decided about it.
        is_measured: whether its costs are those of a real step.
        measured_steps: watched so far, to learn them.
        busy_seconds: of the steps that followed its present plan.
        calls: what the model was called with, and how often in one step at most.
    """

    planned: Planned
    is_measured: bool
    measured_steps: int = 0
    busy_seconds: list[float] = dataclasses.field(default_factory=list)
    calls: Counter[Inputs] = dataclasses.field(default_factory=Counter)

    def is_usual(self, inputs: Inputs, count: int) -> bool:
        """Whether steps of this kind have called the model with these so often; so it is where none were seen."""
        return not self.calls or count <= self.calls[inputs]


class Repertoire:
    """Makes plans, keeps them, and remembers which steps recur.

    Args:
        budget_bytes, config, device: of the room.
        profile: of this machine.
        ledger: gives back the pages of free memory, for planning takes memory of its own.

    Attributes:
        profile: as given.
        acts: the steps that are known, the one that was run last first.
    """

    def __init__(
        self, budget_bytes: int, config: Config, device: torch.device, profile: HardwareProfile, ledger: Ledger
    ) -> None:
        self._budget_bytes, self._config, self._device, self._ledger = budget_bytes, config, device, ledger
        self.profile = profile
        self.acts: list[Act] = []
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._steady = STEADY
        if config.mode != "dynamic":
            _warn_of_compiling()

    @property
    def current(self) -> Act | None:
        """The step that is expected next."""
        return self.acts[0] if self.acts else None

    @property
    def varies(self) -> bool:
        """Whether the steps of late were not all the same."""
        return self._steady < STEADY

    # -- what steps were ------------------------------------------------------------------------------------------

    def followed(self, act: Act, calls: Counter[Inputs]) -> None:
        """A step was this one. `calls`: of the model in it."""
        act.calls |= calls
        self._steady = self._steady + 1 if act is self.acts[0] else 0
        self.acts.remove(act)
        self.acts.insert(0, act)

    def strayed(self, sizes: Sequence[int]) -> bool:
        """A step was none that is known: whether there have been others like it. `sizes`: of what it saved."""
        self._steady = 0
        key = hash(tuple(sizes))
        count = self._seen.pop(key, 0) + 1
        self._seen[key] = count
        if len(self._seen) > MOST_SEEN:
            self._seen.popitem(last=False)
        return count > 1

    def knows(self, trace: Trace) -> bool:
        """Whether there is a plan for steps that do just this."""
        return any(_tell_apart(act.planned.trace) == _tell_apart(trace) for act in self.acts)

    # -- planning -------------------------------------------------------------------------------------------------

    def add(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> None:
        """Plan a step, which is expected next.

        Raises:
            Infeasible: no plan fits the budget.
        """
        planned = self._decide(trace, trace_digest, measurements)
        self.acts.insert(0, Act(planned, is_measured=measurements is not None))
        del self.acts[MOST_PLANS:]

    def fits_without_plan(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> bool:
        """Whether a step for which there is no plan may fit all the same, if a policy decides as it goes on. Not if the
        strategy was chosen, which then is what cannot do it."""
        if self._config.strategy != "auto":
            return False
        trace = release_unneeded(trace)
        costs = price(trace, self.profile, measurements, trace_digest=trace_digest)
        problem = pose(
            trace, costs, self._budget_bytes, min_offload_bytes=self._config.min_offload_bytes,
            host_bytes=self._config.host_bytes,
        )  # fmt: skip
        return problem.floor.peak_bytes <= self._budget_bytes

    def improve(self, act: Act, measurements: Measurements) -> None:
        """Plan a step again, with what its ops really took.

        Raises:
            Infeasible: no plan fits the budget.
        """
        planned = act.planned
        act.planned = self._decide(planned.trace, planned.costs.trace_digest, measurements)
        act.is_measured = True
        act.busy_seconds.clear()

    def keep_pace(self, act: Act, record: StepRecord) -> None:
        """Let the forecast of later steps begin from what planned ones took: a step that is watched takes longer."""
        act.busy_seconds.append(record.seconds - record.stall_seconds)
        # The first one finds caches, allocator and spill file cold.
        if self._device.type != "cpu" or not 1 < len(act.busy_seconds) <= STEPS_THAT_SET_THE_PACE + 1:
            return
        planned, forecast = act.planned, act.planned.forecast
        beyond = statistics.median(act.busy_seconds[1:]) - (forecast.step_seconds - forecast.stall_seconds)
        costs = correct(planned.costs, beyond)
        forecast = simulate(
            planned.trace, costs, planned.plan, host_bytes=self._config.host_bytes, placement=planned.placement
        )
        act.planned = dataclasses.replace(planned, costs=costs, forecast=forecast)

    def _decide(self, trace: Trace, trace_digest: str, measurements: Measurements | None) -> Planned:
        config = self._config
        self._ledger.trim()
        costs = price(trace, self.profile, measurements, trace_digest=trace_digest)
        plan = None
        if config.strategy == "auto":
            plan = keep_all_if_it_fits(trace, costs, self._budget_bytes)
        if plan is None:
            plan = make_plan(
                trace, costs, self._budget_bytes, strategy=config.strategy,
                min_offload_bytes=config.min_offload_bytes, host_bytes=config.host_bytes,
            )  # fmt: skip
        replay = Replay(trace, costs, host_bytes=config.host_bytes)
        placement = replay.place(plan)
        planned = Planned(trace, costs, plan, replay.run(plan, placement=placement), placement)
        self._ledger.trim()
        logger.info(
            "%s: forecast peak %d of %d bytes, %d decisions by %s",
            trace.name, planned.forecast.peak_bytes, self._budget_bytes, len(plan.decisions), plan.strategy
        )  # fmt: skip
        return planned


@functools.cache
def _warn_of_compiling() -> None:
    """Say, once in a process, what the first plan will wait for."""
    if IS_COMPILED and not is_kept():
        logger.warning(
            "where a step needs a plan, the first one waits half a minute or more for loops to be compiled: "
            "`elbowroom build` does that ahead"
        )


def _tell_apart(trace: Trace) -> tuple[object, ...]:
    return list_sizes(trace), [op.name for op in trace.ops if op.tick <= trace.needs[-1].tick]


def list_sizes(trace: Trace) -> list[int]:
    """Bytes of each save of a trace; 0 for what is no plain block of bytes."""
    return [trace.storages[save.storage].nbytes for save in trace.saves]
