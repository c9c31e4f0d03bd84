"""Writes the page of one step: simulates it, and finds the times that no plan can beat."""

from __future__ import annotations

from pathlib import Path

from elbowroom.cli.step_files import StepFiles, load_front
from elbowroom.cli.terminal import Terminal
from elbowroom.errors import UsageError
from elbowroom.units import format_bytes

BOUNDS = 8
"""Budgets for which the page shows the time that no plan can beat."""


def write_page(terminal: Terminal, step: StepFiles, path: Path) -> None:
    """Write the page of a step.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    content = make_page(terminal, step, step.host_bytes)
    write_bytes(path, content)
    terminal.show_text(f"page of {step.trace.name}: {format_bytes(len(content))} written to {path}")


def make_page(
    terminal: Terminal,
    step: StepFiles,
    host_bytes: int | None = None,
    front_file: Path | None = None,
    bounds: int = BOUNDS,
) -> bytes:
    """Return the page of a step.

    Args:
        front_file: plans for other budgets; None for none.
        bounds: number of budgets for which the page shows the time that no plan can beat.

    Raises:
        UsageError, TraceError: see `step_files.load_front`.
    """
    from elbowroom.report.page.content import PageContent
    from elbowroom.report.page.html import render_page
    from elbowroom.report.step_view import view_step
    from elbowroom.simulator.planned import PreparedTrace

    prepared = PreparedTrace(step.trace, step.costs, host_bytes=host_bytes)
    plain = view_step(prepared)
    front = () if front_file is None else load_front(front_file)
    content = PageContent(
        planned=view_step(prepared, step.plan),
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
    # A bound holds for smaller budgets, too.
    seconds = [max(each for _, each in found[index:]) for index in range(len(found))]
    return tuple((budget_bytes, least) for (budget_bytes, _), least in zip(found, seconds, strict=True))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
