"""`elbowroom simulate`: what a plan will do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from elbowroom.cli.parameters import CostsFile, Hardware, HostMemory, Json
from elbowroom.cli.sources import find_costs, load_plan, load_trace, read_host_memory
from elbowroom.cli.terminal import open_terminal
from elbowroom.ir import files
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.journal import Journal
from elbowroom.simulator.addresses import Allocator
from elbowroom.units import format_bytes


def register(app: typer.Typer) -> None:
    """Put this command into the program."""
    app.command()(simulate)


def simulate(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Written by `elbowroom capture`.")],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Written by `elbowroom plan`.")],
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    host_memory: HostMemory = None,
    allocator: Annotated[
        Allocator,
        typer.Option(
            "--allocator",
            help="exact: the bytes in blocks. caching: also what PyTorch's allocator would take from a CUDA device. "
            "planned: also what the same blocks take in one arena, laid out.",
        ),
    ] = Allocator.EXACT,
    as_json: Json = False,
) -> None:
    """Forecast one step of a trace under a plan: peak, seconds, moves, and why each block is where it is."""
    from elbowroom.planner.bounds.bound import bound_plan
    from elbowroom.report.summary import summarize
    from elbowroom.simulator.replay import Replay

    with open_terminal(as_json) as terminal:
        host_bytes = read_host_memory(host_memory)
        trace = load_trace(trace_file)
        plan = load_plan(plan_file, trace)
        costs = find_costs(terminal, trace, hardware, costs_file)
        replay = Replay(trace, costs, host_bytes=host_bytes)
        with terminal.progress(f"forecasting {trace.name}"):
            forecast = replay.run(plan, allocator=allocator, placement=replay.place(plan))
        bound_seconds = bound_plan(trace, costs, plan, host_bytes)
        terminal.show_text(
            summarize(
                budget_bytes=plan.budget_bytes,
                journal=Journal(steps=()),
                trace=trace,
                costs=costs,
                plan=plan,
                forecast=forecast,
                bound_seconds=bound_seconds,
            )
        )
        for line in describe_places(forecast):
            terminal.show(Text(line))
        document = files.to_json(forecast)
        terminal.write_document(
            "simulate",
            name=trace.name,
            hardware=costs.profile_name,
            strategy=plan.strategy,
            budget_bytes=plan.budget_bytes,
            fits=forecast.peak_bytes <= plan.budget_bytes,
            forecast=document,
        )


def describe_places(forecast: Forecast) -> list[str]:
    """Bytes per tier, and what addresses make of them, where there is something to tell."""
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
    """The most bytes that are there at once, and what they take."""
    if not nbytes:
        return "nothing"
    return (
        f"{format_bytes(nbytes)} at once, laid out in {format_bytes(arena_bytes)} ({arena_bytes / nbytes:.3f} of that)"
    )


def _compare(nbytes: int, peak_bytes: int) -> str:
    return f"{nbytes / peak_bytes if peak_bytes else 1.0:.3f} of the peak"
