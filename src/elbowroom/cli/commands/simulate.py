"""`elbowroom simulate`: what a plan will do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elbowroom.cli.parameters import CostsFile, Hardware, Json
from elbowroom.cli.sources import find_costs, load_trace
from elbowroom.cli.terminal import open_terminal
from elbowroom.ir import files
from elbowroom.ir.check import check
from elbowroom.ir.journal import Journal
from elbowroom.ir.plan import Plan


def register(app: typer.Typer) -> None:
    """Put this command into the program."""
    app.command()(simulate)


def simulate(
    trace_file: Annotated[Path, typer.Argument(metavar="TRACE", help="Written by `elbowroom capture`.")],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Written by `elbowroom plan`.")],
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    as_json: Json = False,
) -> None:
    """Forecast one step of a trace under a plan: peak, seconds, moves, and why each block is where it is."""
    from elbowroom.report.summary import summarize
    from elbowroom.simulator.replay import simulate as forecast_step

    with open_terminal(as_json) as terminal:
        trace, plan = load_trace(trace_file), files.load(Plan, plan_file)
        check(trace, plan)
        costs = find_costs(terminal, trace, hardware, costs_file)
        forecast = forecast_step(trace, costs, plan)
        terminal.show_text(
            summarize(
                budget_bytes=plan.budget_bytes,
                journal=Journal(steps=()),
                trace=trace,
                costs=costs,
                plan=plan,
                forecast=forecast,
            )
        )
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
