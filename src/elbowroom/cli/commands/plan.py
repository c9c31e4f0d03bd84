"""`elbowroom plan`: plans one step within a budget."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

import typer

from elbowroom._folders import check_writable
from elbowroom.cli.parameters import (
    Budget,
    CostsFile,
    Hardware,
    HostMemory,
    Json,
    Managed,
    Output,
    Slicing,
    Strategy,
    TraceOrSpec,
    WorkloadOptions,
    with_workload_options,
)
from elbowroom.cli.sources import (
    check_amount,
    count_bytes,
    find_costs_and_profile,
    find_trace,
    group_optimizer,
    is_spec,
    keep_all,
    note_share,
    read_amount,
    read_host_memory,
    save,
)
from elbowroom.cli.terminal import open_terminal
from elbowroom.ir.files import to_json
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.ir.costs import Costs
    from elbowroom.ir.trace import Trace
    from elbowroom.planner.bounds.bound import Bound
    from elbowroom.planner.options import Manages
    from elbowroom.report.state import StateClass


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(with_workload_options(plan))


def plan(
    source: TraceOrSpec,
    budget: Budget,
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    strategy: Strategy = "auto",
    host_memory: HostMemory = None,
    manages: Managed = "activations",
    slices: Slicing = "exact",
    output: Output = None,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Plan one step within a budget, and say what that costs. Exit code 3 if no plan fits."""
    from elbowroom.planner.options import Manages, find_managed, find_strategy
    from elbowroom.planner.problem import find_slices
    from elbowroom.planner.problem import plan as make_plan
    from elbowroom.report.state import tabulate_state
    from elbowroom.simulator.simulate import simulate

    with open_terminal(as_json) as terminal:
        check_writable(output, inputs=(source, costs_file))
        check_amount("--budget", budget)
        managed = find_managed(strategy, manages)
        find_strategy(strategy, managed)
        sliceable = find_slices(slices)
        host_bytes = read_host_memory(host_memory)
        trace = find_trace(terminal, source, options)
        costs, profile = find_costs_and_profile(terminal, trace, hardware, costs_file)
        device_bytes = None if profile is None else count_bytes(profile)
        plain = simulate(trace, costs, keep_all(costs, 0))
        budget_bytes = read_amount("--budget", budget, device_bytes=device_bytes, peak_bytes=plain.peak_bytes)
        note_share(terminal, "--budget", budget, budget_bytes)
        if managed is Manages.EVERYTHING and is_spec(source) and costs_file is None and profile is not None:
            trace, costs = group_optimizer(terminal, source, options, budget_bytes, profile)
        begin = time.perf_counter()
        with terminal.progress(f"planning {trace.name} within {format_bytes(budget_bytes)}"):
            made = make_plan(
                trace, costs, budget_bytes, strategy=strategy, host_bytes=host_bytes, manages=managed, slices=sliceable
            )
            seconds = time.perf_counter() - begin
            outcome = _judge(trace, costs, made, host_bytes=host_bytes, managed=managed, planning_seconds=seconds)
        written = save(made, output)
        terminal.show_facts(f"{trace.name} within {format_bytes(budget_bytes)} on {costs.profile_name}", outcome.rows())
        if made.state:
            terminal.show_text("\n" + "\n".join(tabulate_state(outcome.state)))
        if written:
            terminal.show_text(f"written to {written}")
        terminal.write_document(
            "plan", name=trace.name, hardware=costs.profile_name, **outcome.fields(), output=written
        )


def _judge(
    trace: Trace, costs: Costs, made: Plan, *, host_bytes: int | None, managed: Manages, planning_seconds: float
) -> Outcome:
    from elbowroom.planner.bounds.bound import find_bound
    from elbowroom.planner.problem import pose
    from elbowroom.report.state import count_state

    pose_within = functools.partial(pose, budget_bytes=made.budget_bytes, host_bytes=host_bytes, manages=managed)
    whole = pose_within(trace, costs)
    trace, costs, decided = apply_cuts(trace, costs, made)
    problem = pose_within(trace, costs) if made.cuts else whole
    forecast = problem.drafter.replay.run(decided, placement=problem.drafter.replay.place(decided))
    return Outcome(
        plan=made,
        plain=whole.plain,
        forecast=forecast,
        bound=find_bound(problem),
        planning_seconds=planning_seconds,
        managed=str(managed),
        state=count_state(trace, costs, decided, forecast, host_bytes),
        whole_bytes=whole.floor.peak_bytes,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Plan compared with the plain step.

    Attributes:
        plain, forecast: forecasts without and with the plan.
        bound: lower bound for all plans within this budget.
        planning_seconds: time that the strategy took.
        managed: "activations" or "everything".
        state: classes of the model's state.
        whole_bytes: the smallest budget that works if ops run as a whole.
    """

    plan: Plan
    plain: Forecast
    forecast: Forecast
    bound: Bound
    planning_seconds: float
    managed: str
    state: tuple[StateClass, ...]
    whole_bytes: int

    def count_choices(self) -> dict[str, int]:
        """Return the number of decisions per choice."""
        return {str(choice): self.plan.count_gaps(choice) for choice in (Choice.OFFLOAD, Choice.RECOMPUTE)}

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of the table."""
        plain, forecast = self.plain, self.forecast
        choices = self.count_choices()
        offloaded = {decision.storage for decision in self.plan.decisions if decision.choice is Choice.OFFLOAD}
        smallest, bound = ("smallest budget that works", "lower bound")
        if self.plan.cuts:
            smallest, bound = ("smallest with these slices", "bound of these slices")
        share, waits = forecast.peak_bytes / plain.peak_bytes, format_seconds(forecast.stall_seconds)
        return [
            ("plain peak", format_bytes(plain.peak_bytes), "if everything stays"),
            (smallest, format_bytes(self.bound.floor_bytes), f"{self.bound.floor_bytes} bytes"),
            *self._list_cuts(),
            ("forecast peak", format_bytes(forecast.peak_bytes), f"{share:.0%} of plain"),
            ("plain step", format_seconds(plain.step_seconds), ""),
            ("forecast step", format_seconds(forecast.step_seconds), f"{self.slowdown():.3f} times plain"),
            (bound, format_seconds(self.bound.seconds), f"the forecast is {self.gap():.1%} over it"),
            ("offloaded", format_bytes(forecast.offloaded_bytes), 
             f"in {_count(choices['offload'], 'gap')} between uses, of {_count(len(offloaded), 'storage')}"),
            ("reloaded", format_bytes(forecast.reloaded_bytes), f"{waits} of waiting for moves"),
            *_list_state(forecast),
            *_list_tiers(forecast),
            ("recomputed", format_seconds(forecast.recompute_seconds),
             f"in {_count(choices['recompute'], 'gap')} between uses, by {_count(len(self.plan.segments), 'segment')}"),
            ("planned in", format_seconds(self.planning_seconds), f"strategy {self.plan.strategy}"),
            ("manages", self.managed, "what may leave the device"),
        ]  # fmt: skip

    def _list_cuts(self) -> list[tuple[str, str, str]]:
        """Return the table row for ops that run in slices, if any do."""
        if not self.plan.cuts:
            return []
        return [("ops in slices", str(len(self.plan.cuts)), f"whole ops need {format_bytes(self.whole_bytes)}")]

    def slowdown(self) -> float:
        """Step time relative to the plain step."""
        return self.forecast.step_seconds / self.plain.step_seconds if self.plain.step_seconds else 1.0

    def gap(self) -> float:
        """Share by which the step exceeds the bound."""
        return self.bound.over(self.forecast.step_seconds)

    def fields(self) -> dict[str, Any]:
        """Return the fields of the JSON document."""
        return {
            "strategy": self.plan.strategy,
            "manages": self.managed,
            "budget_bytes": self.plan.budget_bytes,
            "smallest_budget_bytes": self.bound.floor_bytes,
            "plain_peak_bytes": self.plain.peak_bytes,
            "plain_step_seconds": self.plain.step_seconds,
            "forecast_peak_bytes": self.forecast.peak_bytes,
            "forecast_step_seconds": self.forecast.step_seconds,
            "slowdown": self.slowdown(),
            "bound_step_seconds": self.bound.seconds,
            "gap": self.gap(),
            "offloaded_bytes": self.forecast.offloaded_bytes,
            "reloaded_bytes": self.forecast.reloaded_bytes,
            "state_offloaded_bytes": self.forecast.state_offloaded_bytes,
            "state_reloaded_bytes": self.forecast.state_reloaded_bytes,
            "state": to_json(self.state),
            "lower_tier_bytes": self.forecast.lower_tier_bytes,
            "lower_arena_bytes": self.forecast.lower_arena_bytes,
            "disk_bytes": self.forecast.disk_bytes,
            "disk_arena_bytes": self.forecast.disk_arena_bytes,
            "recompute_seconds": self.forecast.recompute_seconds,
            "stall_seconds": self.forecast.stall_seconds,
            "decisions": self.count_choices(),
            "segments": len(self.plan.segments),
            "ops_in_slices": len(self.plan.cuts),
            "smallest_budget_of_whole_ops_bytes": self.whole_bytes,
            "planning_seconds": self.planning_seconds,
        }


def _list_state(forecast: Forecast) -> list[tuple[str, str, str]]:
    """Return the table row for the part of the moves that is the model's state."""
    if not forecast.state_reloaded_bytes:
        return []
    back = format_bytes(forecast.state_reloaded_bytes)
    return [("of that, state", format_bytes(forecast.state_offloaded_bytes), f"{back} reloaded, in every step")]


def _list_tiers(forecast: Forecast) -> list[tuple[str, str, str]]:
    """Return table rows for the bytes of copies in each lower tier that holds any."""
    tiers = (
        ("below the device", forecast.lower_tier_bytes, forecast.lower_arena_bytes),
        ("on the disk behind", forecast.disk_bytes, forecast.disk_arena_bytes),
    )
    return [
        (name, format_bytes(arena), f"laid out; {format_bytes(nbytes)} live at the peak")
        for name, nbytes, arena in tiers
        if nbytes
    ]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
