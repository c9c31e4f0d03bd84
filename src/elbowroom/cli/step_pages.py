"""Writes the page of one step: simulates it, and finds the times that no plan can beat."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from elbowroom._folders import replacing
from elbowroom.cli.sources import check_host_memory
from elbowroom.cli.step_files import StepFiles, load_front
from elbowroom.cli.terminal import Terminal
from elbowroom.units import format_bytes

if TYPE_CHECKING:
    from elbowroom.planner.options import Manages
    from elbowroom.planner.problem import Problem
    from elbowroom.report.page.content import PlanPoint

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontRequest:
    """Bounds and plans within other budgets that a page shows.

    Attributes:
        file: plans from `elbowroom compare --output`; None for none.
        plans: number of other budgets to plan for, by the strategy of the step's plan.
        bounds: number of budgets for which the time that no plan can beat is computed.
    """

    file: Path | None = None
    plans: int = 0
    bounds: int = BOUNDS


def make_page(
    terminal: Terminal, step: StepFiles, host_bytes: int | None = None, request: FrontRequest | None = None
) -> bytes:
    """Return the page of a step.

    Raises:
        UsageError, TraceError: see `step_files.load_front` and `sources.check_host_memory`.
    """
    from elbowroom.planner.options import Manages
    from elbowroom.report.page.content import PageContent
    from elbowroom.report.page.html import render_page
    from elbowroom.report.step_view import view_step
    from elbowroom.simulator.planned import PreparedTrace

    request = request or FrontRequest()
    prepared = PreparedTrace(step.trace, step.costs, host_bytes=host_bytes)
    plain, planned = view_step(prepared), view_step(prepared, step.plan)
    check_host_memory(planned.forecast, host_bytes)
    front = None if request.file is None else load_front(request.file, step)
    moves_state = (step.plan is not None and bool(step.plan.state)) or (
        front is not None and front.manages is Manages.EVERYTHING
    )
    manages = Manages.EVERYTHING if moves_state else Manages.ACTIVATIONS  # so that bounds hold for all plans shown
    others = _OtherBudgets(terminal, step, plain.forecast.peak_bytes, host_bytes, manages)
    content = PageContent(
        planned=planned,
        plain=plain,
        budget_bytes=step.budget_bytes,
        journal=step.journal,
        bounds=others.find_bounds(request.bounds),
        front=(*(() if front is None else front.plans), *others.make_plans(request.plans)),
        measured=step.activities,
    )
    return render_page(content).encode()


class _OtherBudgets:
    """Bounds and plans of one step within budgets from the smallest that works to the plain peak."""

    def __init__(
        self, terminal: Terminal, step: StepFiles, plain_bytes: int, host_bytes: int | None, manages: Manages
    ) -> None:
        self._terminal = terminal
        self._step = step
        self._plain_bytes = plain_bytes
        self._host_bytes = host_bytes
        self._manages = manages

    def find_bounds(self, count: int) -> tuple[tuple[int, float], ...]:
        """Return budgets, and the step time that no plan within each can beat."""
        from elbowroom.planner.bounds.bound import find_bound

        found = []
        with self._terminal.progress(f"bounds of {self._step.trace.name}") as advance:
            for index, budget_bytes in enumerate(self._list_budgets(count)):
                advance(format_bytes(budget_bytes), index / count)
                found.append((budget_bytes, find_bound(self._pose(budget_bytes)).seconds))
        # A bound holds for smaller budgets, too.
        seconds = [max(each for _, each in found[index:]) for index in range(len(found))]
        return tuple((budget_bytes, least) for (budget_bytes, _), least in zip(found, seconds, strict=True))

    def make_plans(self, count: int) -> list[PlanPoint]:
        """Return forecasts of plans by the strategy of the step's plan, the best found that fits each budget.

        A step in which everything fits has a plan of no strategy: others are made by `auto`.
        """
        from elbowroom.planner.comparison.strategies_compared import compare, even_out
        from elbowroom.planner.plain import EVERYTHING_FITS
        from elbowroom.report.page.content import PlanPoint

        step = self._step
        strategy = "auto" if step.plan is None or step.plan.strategy == EVERYTHING_FITS else step.plan.strategy
        budgets = self._list_budgets(count)
        entries = []
        with self._terminal.progress(f"plans of {step.trace.name}") as advance:
            running = compare(
                step.trace, step.costs, budgets, [strategy], host_bytes=self._host_bytes, manages=str(self._manages)
            )
            for index, budget_bytes in enumerate(budgets):
                advance(format_bytes(budget_bytes), index / count)
                entries.append(next(running))
        return [
            PlanPoint(
                strategy=strategy,
                budget_bytes=entry.budget_bytes,
                peak_bytes=entry.outcome.peak_bytes,
                step_seconds=entry.outcome.step_seconds,
            )
            for entry in even_out(entries)
            if entry.outcome is not None
        ]

    def _pose(self, budget_bytes: int) -> Problem:
        from elbowroom.planner.problem import pose

        step = self._step
        return pose(step.trace, step.costs, budget_bytes, host_bytes=self._host_bytes, manages=self._manages)

    def _list_budgets(self, count: int) -> list[int]:
        """Return budgets in order, closer together near the smallest, where the time changes most."""
        if not count:
            return []
        floor_bytes = self._pose(1).floor.peak_bytes
        shares = [(index / max(1, count - 1)) ** 1.5 for index in range(count)]
        return [floor_bytes + int(share * max(0, self._plain_bytes - floor_bytes)) for share in shares]


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    with replacing(path) as part:
        part.write_bytes(content)
