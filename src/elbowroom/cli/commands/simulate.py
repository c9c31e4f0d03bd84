"""`elbowroom simulate`: forecasts a step under a plan or a policy, of one device or of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from elbowroom._family import get, names
from elbowroom.cli.parameters import AMOUNTS, CostsFile, Hardware, HostMemory, Json, check_positive
from elbowroom.cli.rank_options import (
    BucketBytes,
    BucketView,
    Collectives,
    Division,
    MicroBatches,
    NetworkName,
    RankOptions,
    Ranks,
    Reshard,
    ScheduleName,
    ShardDtypeName,
    StageCount,
)
from elbowroom.cli.rank_tables import show_ranks, show_scaling
from elbowroom.cli.sources import (
    check_amount,
    check_host_memory,
    find_costs_and_device,
    keep_all,
    load_plan,
    load_trace,
    note_share,
    read_amount,
    read_host_memory,
)
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.ir import files
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.journal import Journal
from elbowroom.ir.parallelism import Parallel
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.residency import policies
from elbowroom.simulator.allocator_model import Allocator
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.simulator.planned import PreparedTrace

_Policy = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"Decides as the step goes on, in place of a plan; needs --budget: {', '.join(names(policies))}.",
        autocompletion=lambda: list(names(policies)),
    ),
]
_Budget = Annotated[str | None, typer.Option("--budget", help=f"Bytes the step may hold under a policy: {AMOUNTS}.")]
_Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        callback=check_positive,
        help="Simulate so many steps under a policy, and report the last: predictive learns from each (1).",
    ),
]
_Allocator = Annotated[
    Allocator,
    typer.Option(
        "--allocator",
        help="exact: the bytes in blocks. caching: also what PyTorch's allocator would take from a CUDA device. "
        "planned: also what the same blocks take in one arena, laid out (of a plan only).",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(simulate)


def simulate(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Written by `elbowroom capture`.")],
    plan_file: Annotated[
        Path | None, typer.Argument(metavar="PLAN", help="Written by `elbowroom plan`; or give --policy.")
    ] = None,
    policy: _Policy = None,
    budget: _Budget = None,
    steps: _Steps = None,
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    host_memory: HostMemory = None,
    allocator: _Allocator = Allocator.EXACT,
    ranks: Ranks = None,
    network: NetworkName = None,
    parallel: Division = None,
    algorithm: Collectives = None,
    bucket: BucketBytes = None,
    bucket_view: BucketView = None,
    reshard: Reshard = None,
    shard_dtype: ShardDtypeName = None,
    stages: StageCount = None,
    micro_batches: MicroBatches = None,
    schedule: ScheduleName = None,
    as_json: Json = False,
) -> None:
    """Forecast one step of a trace under a plan, or under a policy within a budget: peak, seconds and moves.

    For a plan, also explain why each block is where it is. With --ranks, forecast the step of a job of several
    processes instead, under a plan or with everything kept: seconds and memory per rank. Exit code 3 if the policy
    finds no room."""
    options = RankOptions(
        ranks=ranks, network=network, parallel=parallel, algorithm=algorithm, bucket=bucket, bucket_view=bucket_view,
        reshard=reshard, shard_dtype=shard_dtype, stages=stages, micro_batches=micro_batches, schedule=schedule,
    )  # fmt: skip
    with open_terminal(as_json) as terminal:
        options.check()
        sources = _Sources(trace_file, plan_file, hardware, costs_file, host_memory)
        if ranks is None:
            _check_choice(plan_file, policy, budget, steps, allocator)
            _forecast_device(terminal, sources, policy, budget, steps or 1, allocator)
        else:
            _check_ranks(policy, budget, steps, allocator)
            _forecast_ranks(terminal, sources, options)


class _Sources(NamedTuple):
    """Files and machine of a forecast, as they were given."""

    trace_file: Path
    plan_file: Path | None
    hardware: str
    costs_file: Path | None
    host_memory: str | None


def _forecast_device(
    terminal: Terminal, sources: _Sources, policy: str | None, budget: str | None, steps: int, allocator: Allocator
) -> None:
    """Forecast a step of one device."""
    from elbowroom.planner.bounds.bound import bound_plan
    from elbowroom.report.summary import summarize
    from elbowroom.simulator.planned import PreparedTrace

    host_bytes = read_host_memory(sources.host_memory)
    trace = load_trace(sources.trace_file)
    plan = None if sources.plan_file is None else load_plan(sources.plan_file, trace)
    costs, device_bytes = find_costs_and_device(terminal, trace, sources.hardware, sources.costs_file)
    if plan is not None:
        trace, costs, plan = apply_cuts(trace, costs, plan)
    prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
    budget_bytes = _read_budget(terminal, prepared, budget, device_bytes) if plan is None else plan.budget_bytes
    with terminal.progress(f"forecasting {trace.name}"):
        if plan is None:
            forecast = _simulate_steps(prepared, budget_bytes, policy, steps, host_bytes, allocator)
        else:
            forecast = prepared.run(plan, allocator=allocator, placement=prepared.place(plan))
            check_host_memory(forecast, host_bytes)
    report = summarize(
        budget_bytes=budget_bytes, journal=Journal(steps=()), trace=trace, costs=costs, plan=plan,
        policy=policy or "", forecast=forecast,
        bound_seconds=bound_plan(trace, costs, plan or keep_all(costs, budget_bytes), host_bytes),
    )  # fmt: skip
    terminal.show_text(report)
    for line in describe_places(forecast):
        terminal.show(Text(line))
    terminal.write_document(
        "simulate", name=trace.name, hardware=costs.profile_name, policy=policy, budget_bytes=budget_bytes,
        strategy=None if plan is None else plan.strategy,
        fits=forecast.peak_bytes <= budget_bytes,
        forecast=files.to_json(forecast),
    )  # fmt: skip


def _forecast_ranks(terminal: Terminal, sources: _Sources, options: RankOptions) -> None:
    """Forecast a step of several ranks, for each number of them."""
    from elbowroom.simulator.ranks.simulate_ranks import simulate_ranks
    from elbowroom.simulator.ranks.turns import replays_freed_weights

    host_bytes = read_host_memory(sources.host_memory)
    network, parallelisms = options.find_network(), options.list_parallelisms()
    trace = load_trace(sources.trace_file)
    plan = None if sources.plan_file is None else load_plan(sources.plan_file, trace)
    costs, device_bytes = find_costs_and_device(terminal, trace, sources.hardware, sources.costs_file)
    used = plan or keep_all(costs, 0)
    reshards = parallelisms[0].reshard_after_forward
    if parallelisms[0].kind is Parallel.SHARDED and replays_freed_weights(trace, used, reshard_after_forward=reshards):
        terminal.note(
            "this plan replays ops that read weights, which fully_shard has freed by then: a room would not, and the "
            "forecast takes the weights to be there"
        )
    with terminal.progress(f"forecasting {trace.name}"):
        forecasts = [simulate_ranks(trace, costs, used, network, each, host_bytes=host_bytes) for each in parallelisms]
    title = f"{trace.name} on {costs.profile_name}, {network.name}"
    if len(forecasts) == 1:
        show_ranks(terminal, title, parallelisms[0], forecasts[0], device_bytes)
    else:
        show_scaling(terminal, title, parallelisms[0].kind, forecasts, device_bytes)
    terminal.write_document(
        "simulate", name=trace.name, hardware=costs.profile_name, network=files.to_json(network),
        strategy=None if plan is None else plan.strategy, device_bytes=device_bytes,
        jobs=[
            {"parallelism": files.to_json(each), "efficiency": forecast.efficiency, "forecast": files.to_json(forecast)}
            for each, forecast in zip(parallelisms, forecasts, strict=True)
        ],
    )  # fmt: skip


def _check_ranks(policy: str | None, budget: str | None, steps: int | None, allocator: Allocator) -> None:
    given = [
        name for name, value in (("--policy", policy), ("--budget", budget), ("--steps", steps)) if value is not None
    ]
    if allocator is not Allocator.EXACT:
        given.append("--allocator")
    if given:
        raise UsageError(
            f"{', '.join(given)}: a step of several ranks is forecast under a plan, or with everything kept, block by "
            "block; leave this out, or --ranks"
        )


def _check_choice(
    plan_file: Path | None, policy: str | None, budget: str | None, steps: int | None, allocator: Allocator
) -> None:
    """Check the options before anything is read."""
    if policy is not None:
        get(policies, policy, "Policy")
        if plan_file is not None:
            raise UsageError(f"--policy {policy} takes the place of a plan: leave out {plan_file}, or --policy")
        if budget is None:
            raise UsageError(f"--policy {policy} needs --budget: the bytes that the step may hold")
        if allocator is Allocator.PLANNED:
            raise UsageError("--allocator planned needs a plan: a policy's evictions are not known ahead")
        check_amount("--budget", budget)
    elif plan_file is None:
        raise UsageError(
            "nothing to forecast: give a PLAN written by `elbowroom plan`, --policy with --budget, or --ranks with "
            "--network"
        )
    elif budget is not None or steps is not None:
        option = "--budget" if budget is not None else "--steps"
        raise UsageError(f"{option} belongs to --policy; a plan has its own budget, and each step of it is the same")


def _read_budget(terminal: Terminal, prepared: PreparedTrace, budget: str | None, device_bytes: int | None) -> int:
    assert budget is not None  # as there is a policy
    plain = prepared.run(keep_all(prepared.costs, 0))
    budget_bytes = read_amount("--budget", budget, device_bytes=device_bytes, peak_bytes=plain.peak_bytes)
    note_share(terminal, "--budget", budget, budget_bytes)
    return budget_bytes


def _simulate_steps(
    prepared: PreparedTrace,
    budget_bytes: int,
    policy: str | None,
    steps: int,
    host_bytes: int | None,
    allocator: Allocator,
) -> Forecast:
    """Forecast the last of several steps, each of which may teach the policy for the next."""
    assert policy is not None  # as there is no plan
    from elbowroom.residency.access_history import AccessHistory
    from elbowroom.simulator.online import simulate_policy

    history = AccessHistory()
    for _ in range(steps):
        forecast = simulate_policy(
            prepared.trace, prepared.costs, budget_bytes,
            policy=policy, history=history, host_bytes=host_bytes, allocator=allocator,
        )  # fmt: skip
    return forecast


def describe_places(forecast: Forecast) -> list[str]:
    """Return sentences on the bytes per lower tier, the caching allocator and the arena, as far as known."""
    lines = []
    if forecast.lower_tier_bytes or forecast.disk_bytes:
        line = "Below the device at most " + describe_arena(forecast.lower_tier_bytes, forecast.lower_arena_bytes)
        if forecast.disk_bytes:
            line += ", and on the disk behind that " + describe_arena(forecast.disk_bytes, forecast.disk_arena_bytes)
        lines.append("\n" + line)
    peak = forecast.peak_bytes
    if forecast.reserved_bytes:
        lines.append(
            f"\nA caching allocator would take {format_bytes(forecast.reserved_bytes)} from the device, "
            f"{_compare(forecast.reserved_bytes, peak)}; {format_bytes(forecast.fragmented_bytes)} of it never in use "
            "with the rest"
        )
    if forecast.arena_bytes:
        saved = format_bytes(max(0, forecast.reserved_bytes - forecast.arena_bytes))
        lines.append(
            f"Laid out in one arena the same blocks take {format_bytes(forecast.arena_bytes)}, "
            f"{_compare(forecast.arena_bytes, peak)}: {saved} less"
        )
    return lines


def describe_arena(nbytes: int, arena_bytes: int) -> str:
    """Describe the peak bytes, and the size of their arena if they were laid out."""
    if not nbytes:
        return "nothing"
    laid_out = f", laid out in {format_bytes(arena_bytes)} ({arena_bytes / nbytes:.3f} of that)" if arena_bytes else ""
    return f"{format_bytes(nbytes)} at once{laid_out}"


def _compare(nbytes: int, peak_bytes: int) -> str:
    return f"{nbytes / peak_bytes if peak_bytes else 1.0:.3f} of the peak"
