"""`elbowroom view`: writes a page, a Perfetto trace or a memory snapshot of one step."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from elbowroom._folders import check_writable
from elbowroom.cli.parameters import CostsFile, Hardware, HostMemory, Json
from elbowroom.cli.sources import check_host_memory, read_host_memory
from elbowroom.cli.step_files import StepFiles, load_step
from elbowroom.cli.step_pages import BOUNDS, FrontRequest, make_page, write_bytes
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.units import format_bytes


class Format(enum.StrEnum):
    """Format of what is written."""

    HTML = "html"
    PERFETTO = "perfetto"
    MEMORY_VIZ = "memory_viz"


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(view)


def view(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Written by `elbowroom run --output`; or a trace, by `elbowroom capture`."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Write the result to this file.")],
    written_format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="html: a page for any browser. perfetto: for ui.perfetto.dev. memory_viz: a snapshot for "
            "pytorch.org/memory_viz.",
        ),
    ] = Format.HTML,
    trace_file: Annotated[Path | None, typer.Option("--trace", help="The trace of a run that has no plan.")] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="A plan for the trace.")] = None,
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    host_memory: HostMemory = None,
    front_file: Annotated[
        Path | None, typer.Option("--front", help="Plans for other budgets, from `elbowroom compare --output`.")
    ] = None,
    bounds: Annotated[
        int | None,
        typer.Option(
            "--bounds",
            min=0,
            help=f"Budgets for which the page shows the lower bound of the step time; {BOUNDS} if not given.",
        ),
    ] = None,
    plans: Annotated[
        int,
        typer.Option(
            "--plans", min=0, help="Other budgets to plan for, by the same strategy; each takes as long as one."
        ),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Show one step over time: bytes by class, lanes, blocks, and the reasons of the plan. The page works offline.

    Times are those of the forecast; a run adds its measurements.
    """
    with open_terminal(as_json) as terminal:
        check_writable(output, inputs=(file, trace_file, plan_file, costs_file, front_file))
        given = (("--plans", plans > 0), ("--front", front_file is not None), ("--bounds", bounds is not None))
        of_page = [option for option, is_given in given if is_given]
        if of_page and written_format is not Format.HTML:
            raise UsageError(f"{of_page[0]} belongs to the page: leave it out, or --format {written_format}")
        step = load_step(
            terminal, file, trace_file=trace_file, plan_file=plan_file, hardware=hardware, costs_file=costs_file
        )
        host_bytes = step.host_bytes if host_memory is None else read_host_memory(host_memory)
        request = FrontRequest(file=front_file, plans=plans, bounds=BOUNDS if bounds is None else bounds)
        content = _write(terminal, step, host_bytes, written_format, request)
        write_bytes(output, content)
        terminal.show_text(f"{step.trace.name}: {format_bytes(len(content))} written to {output}")
        terminal.write_document(
            "view", name=step.trace.name, format=str(written_format), nbytes=len(content), output=str(output)
        )


def _write(
    terminal: Terminal, step: StepFiles, host_bytes: int | None, written_format: Format, request: FrontRequest
) -> bytes:
    from elbowroom.report.memory_viz import write_snapshot
    from elbowroom.report.perfetto import write_perfetto
    from elbowroom.report.step_view import view_step
    from elbowroom.simulator.planned import PreparedTrace

    if written_format is Format.HTML:
        return make_page(terminal, step, host_bytes, request)
    prepared = PreparedTrace(step.trace, step.costs, host_bytes=host_bytes)
    planned = view_step(prepared, step.plan)
    check_host_memory(planned.forecast, host_bytes)
    if written_format is Format.PERFETTO:
        return write_perfetto(planned, step.budget_bytes, step.activities)
    return write_snapshot(planned)
