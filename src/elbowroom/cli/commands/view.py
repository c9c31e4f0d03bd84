"""`elbowroom view`: writes a page, a Perfetto trace or a memory snapshot of one step."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elbowroom.cli.parameters import CostsFile, Hardware, HostMemory, Json
from elbowroom.cli.sources import check_writable, read_host_memory
from elbowroom.cli.step_files import StepFiles, load_front, load_step
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.report.step_view import StepView

BOUNDS = 8
"""Budgets for which the page shows the time that no plan can beat."""


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
        int, typer.Option("--bounds", min=0, help="Budgets at which the page shows the time no plan can beat.")
    ] = BOUNDS,
    as_json: Json = False,
) -> None:
    """Show one step over time: bytes by class, lanes, blocks, and the reasons of the plan. The page works offline.

    Times are those of the forecast; a run adds its measurements.
    """
    with open_terminal(as_json) as terminal:
        check_writable(output)
        if front_file is not None and written_format is not Format.HTML:
            raise UsageError(f"--front belongs to the page: leave it out, or --format {written_format}")
        step = load_step(
            terminal, file, trace_file=trace_file, plan_file=plan_file, hardware=hardware, costs_file=costs_file
        )
        host_bytes = read_host_memory(host_memory)
        content = _write(terminal, step, host_bytes, written_format, front_file, bounds)
        write_bytes(output, content)
        terminal.show_text(f"{step.trace.name}: {format_bytes(len(content))} written to {output}")
        terminal.write_document(
            "view", name=step.trace.name, format=str(written_format), nbytes=len(content), output=str(output)
        )


def _write(
    terminal: Terminal,
    step: StepFiles,
    host_bytes: int | None,
    written_format: Format,
    front_file: Path | None,
    bounds: int,
) -> bytes:
    from elbowroom.report.memory_viz import write_snapshot
    from elbowroom.report.perfetto import write_perfetto
    from elbowroom.report.step_view import view_step
    from elbowroom.simulator.planned import PreparedTrace

    prepared = PreparedTrace(step.trace, step.costs, host_bytes=host_bytes)
    planned = view_step(prepared, step.plan)
    if written_format is Format.PERFETTO:
        return write_perfetto(planned, step.budget_bytes, step.activities)
    if written_format is Format.MEMORY_VIZ:
        return write_snapshot(planned)
    return make_page(terminal, step, planned, view_step(prepared), host_bytes, front_file, bounds)


def make_page(
    terminal: Terminal,
    step: StepFiles,
    planned: StepView,
    plain: StepView,
    host_bytes: int | None,
    front_file: Path | None,
    bounds: int,
) -> bytes:
    """Return the page of a step.

    Raises:
        UsageError, TraceError: see `step_files.load_front`.
    """
    from elbowroom.report.page.content import PageContent
    from elbowroom.report.page.html import render_page

    front = () if front_file is None else load_front(front_file)
    content = PageContent(
        planned=planned,
        plain=plain,
        budget_bytes=step.budget_bytes,
        journal=step.journal,
        bounds=_find_bounds(terminal, step, plain.forecast.peak_bytes, host_bytes, bounds),
        front=front,
        measured=step.activities,
    )
    return render_page(content).encode()


def _find_bounds(
    terminal: Terminal, step: StepFiles, plain_bytes: int, host_bytes: int | None, count: int
) -> tuple[tuple[int, float], ...]:
    """Return the step time that no plan can beat, for budgets from the smallest that works to the plain peak."""
    from elbowroom.planner.bounds.bound import find_bound
    from elbowroom.planner.options import Manages
    from elbowroom.planner.problem import pose

    if not count:
        return ()
    manages = Manages.EVERYTHING if step.plan is not None and step.plan.state else Manages.ACTIVATIONS
    floor_bytes = pose(step.trace, step.costs, 1, host_bytes=host_bytes, manages=manages).floor.peak_bytes
    # Closer together near the smallest budget, where the time changes most.
    shares = [(index / max(1, count - 1)) ** 1.5 for index in range(count)]
    found = []
    with terminal.progress(f"bounds of {step.trace.name}") as advance:
        for index, share in enumerate(shares):
            budget_bytes = floor_bytes + int(share * max(0, plain_bytes - floor_bytes))
            advance(format_bytes(budget_bytes), index / count)
            problem = pose(step.trace, step.costs, budget_bytes, host_bytes=host_bytes, manages=manages)
            found.append((budget_bytes, find_bound(problem).seconds))
    return tuple(found)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
