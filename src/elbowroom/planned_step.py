"""A planned step: what a room knows of one kind of step."""

from __future__ import annotations

import dataclasses
import functools

from elbowroom.cost.price import correct
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.ir.unused_state import list_unused_state
from elbowroom.report.table import render_table
from elbowroom.runtime.candidate import Candidate
from elbowroom.simulator.planned import PreparedTrace


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """One kind of step: its trace, costs, plan, forecast, and the placement of its copies. Made by `forecast_plan`."""

    trace: Trace
    costs: Costs = dataclasses.field(repr=False)
    plan: Plan
    placement: Placement = dataclasses.field(repr=False)
    host_bytes: int | None = None

    @functools.cached_property
    def forecast(self) -> Forecast:
        """Forecast of the step under its plan."""
        return PreparedTrace(self.trace, self.costs, host_bytes=self.host_bytes).run(
            self.plan, placement=self.placement
        )

    def _repr_html_(self) -> str:
        plan, forecast = self.plan, self.forecast
        figures: dict[str, int | float | str] = {
            "ops": len(self.trace.ops),
            "strategy": plan.strategy,
            "budget_bytes": plan.budget_bytes,
            "offloaded_gaps": plan.count_gaps(Choice.OFFLOAD),
            "offloaded_state_gaps": len(plan.state),
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

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if the plan moves nothing, and needs no unused state to be away."""
        return not (self.plan.decisions or self.plan.state or list_unused_state(self.trace))

    @functools.cached_property
    def busy_seconds(self) -> float:
        """Forecast seconds of the step, stalls excluded."""
        return self.forecast.step_seconds - self.forecast.stall_seconds

    @property
    def moving_seconds(self) -> float:
        """Forecast seconds that moves add to the step, stalls excluded."""
        return max(0.0, self.busy_seconds - self.costs.plain_seconds)

    @functools.cached_property
    def peak_bytes(self) -> int:
        """Forecast peak."""
        return self.forecast.peak_bytes

    def correct(self, seconds: float) -> PlannedStep:
        """Return the same step, which takes so many more seconds, or fewer."""
        corrected = dataclasses.replace(self, costs=correct(self.costs, seconds))
        if self.is_plain:  # else the simulator would take as long as a small step, for a forecast that nobody may need
            vars(corrected).update(peak_bytes=self.peak_bytes, busy_seconds=self.busy_seconds + seconds)
        return corrected

    @functools.cached_property
    def candidate(self) -> Candidate:
        """Form in which a runner matches a running step against this one."""
        return Candidate(self.trace, self.plan, self.placement)

    @functools.cached_property
    def activation_bytes(self) -> int:
        """Bytes at the peak beyond those that exist before the step."""
        there = sum(home.nbytes for home in self.trace.storages if home.created < 0 and home.role is not Role.INPUT)
        return max(0, self.peak_bytes - there)

    def count_spare_bytes(self, budget_bytes: int, live_bytes: int) -> int:
        """Return the bytes of a budget that a step leaves free; negative if it goes over it.

        Args:
            live_bytes: on the device before the step, and model state that is away. Beside what the trace knows, the
                program may hold more by now.
        """
        return budget_bytes - self.peak_bytes - max(0, self.count_more(live_bytes))

    def count_more(self, live_bytes: int) -> int:
        """Return how many more bytes are on the device before the step than the trace knows; negative if it is less."""
        return live_bytes - self._bytes_before

    @functools.cached_property
    def _bytes_before(self) -> int:
        size = self.costs.alignment_bytes
        return sum(-(-home.nbytes // size) * size for home in self.trace.storages if home.created < 0)


def forecast_plan(trace: Trace, costs: Costs, plan: Plan, host_bytes: int | None) -> PlannedStep:
    """Return a step with its plan, placed and simulated.

    Args:
        host_bytes: as for `simulator.simulate.simulate`.

    Raises:
        TraceError: the costs belong to another trace, or are invalid.
    """
    replay = PreparedTrace(trace, costs, host_bytes=host_bytes)
    planned = PlannedStep(trace, costs, plan, replay.place(plan), host_bytes)
    vars(planned)["forecast"] = replay.run(plan, placement=planned.placement)  # the trace is prepared
    return planned
