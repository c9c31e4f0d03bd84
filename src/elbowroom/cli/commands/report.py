"""`elbowroom report`: reports on steps from their journal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elbowroom._folders import check_writable
from elbowroom.cli.journal_files import load_journal
from elbowroom.cli.parameters import CostsFile, Hardware, Json
from elbowroom.cli.sources import check_belongs, find_costs, load_plan, load_trace
from elbowroom.cli.step_files import load_run_step
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.ir import files
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Plan
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.ir.trace import Trace

_TABLES = ("kind", "module")
_BY_HELP = "The table of the step: kind (the default), why each block is where it is; module, bytes by module."
_HTML_HELP = "Write the page of the first journal's step to this file, as `elbowroom view` does."


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("report")(render_report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The step of a journal, as far as it is known; None for the rest."""

    trace: Trace | None = None
    costs: Costs | None = None
    plan: Plan | None = None
    forecast: Forecast | None = None
    bound_seconds: float = 0.0


def render_report(
    journals: Annotated[
        list[Path], typer.Argument(metavar="JOURNAL...", help="Written by `elbowroom run --output`, or its --json.")
    ],
    trace_file: Annotated[
        Path | None, typer.Option("--trace", help="Its trace, where the file has no step of its own.")
    ] = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="The plan that was carried out.")] = None,
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    by: Annotated[str, typer.Option("--by", help=_BY_HELP, autocompletion=lambda: list(_TABLES))] = "kind",
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, help="Levels of modules, with --by module; as many as fit if not given."),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help=_HTML_HELP)] = None,
    as_json: Json = False,
) -> None:
    """Report on steps: forecast beside measurements, and with a trace why each block is where it is."""
    from elbowroom.report.steady import count_modes, find_steady
    from elbowroom.report.summary import check_table, summarize

    with open_terminal(as_json) as terminal:
        check_table(by, depth)
        if trace_file is None:
            check_belongs("--trace", hardware, costs_file)
        check_writable(html, inputs=(*journals, trace_file, plan_file, costs_file))
        read = [(path, *load_journal(path)) for path in journals]
        if trace_file is not None or plan_file is not None:
            step = _load_step(terminal, trace_file, plan_file, hardware, costs_file)
            for path in journals:
                _check_same_step(path, step, trace_file or plan_file)
            steps = [step] * len(read)
        else:
            steps = [_load_own_step(path) for path in journals]
        documents: list[dict[str, Any]] = []
        for (path, journal, run_budget_bytes), each in zip(read, steps, strict=True):
            budget_bytes = run_budget_bytes or (0 if each.plan is None else each.plan.budget_bytes)
            text = summarize(
                budget_bytes=budget_bytes, journal=journal, trace=each.trace, costs=each.costs, plan=each.plan,
                forecast=each.forecast, bound_seconds=each.bound_seconds, by=by, depth=depth,
            )  # fmt: skip
            steady = find_steady(journal)
            forecast = each.forecast
            documents.append(
                {
                    "file": str(path),
                    "budget_bytes": budget_bytes,
                    "modes": {str(mode): count for mode, count in count_modes(journal).items()},
                    "steady": None if steady is None else files.to_json(steady),
                    "forecast_peak_bytes": None if forecast is None else forecast.peak_bytes,
                    "forecast_step_seconds": None if forecast is None else forecast.step_seconds,
                    "report": text,
                }
            )
            terminal.show_text((f"{path}\n\n" if len(read) > 1 else "") + text + ("\n" if len(read) > 1 else ""))
        if html is not None:
            _write_page(terminal, journals[0], html, (trace_file, plan_file, costs_file), hardware)
        modules = _list_modules(steps[0]) if by == "module" else None
        terminal.write_document("report", reports=documents, modules=modules, state=_list_state(steps[0]))


def _list_modules(step: _Step) -> list[dict[str, Any]] | None:
    """Return the rows of the table of modules; None without a trace."""
    from elbowroom.report.modules import count_by_module

    if step.trace is None or step.costs is None:
        return None
    return [files.to_json(each) for each in count_by_module(step.trace, step.costs, step.plan, step.forecast)]


def _list_state(step: _Step) -> list[dict[str, Any]] | None:
    """Return the rows of the table of state; None without a plan of a trace."""
    from elbowroom.report.state import count_state

    if step.trace is None or step.costs is None or step.plan is None or step.forecast is None:
        return None
    return [files.to_json(each) for each in count_state(step.trace, step.costs, step.plan, step.forecast)]


def _write_page(
    terminal: Terminal, journal: Path, html: Path, given: tuple[Path | None, Path | None, Path | None], hardware: str
) -> None:
    """Write the page of a run. `given`: files of its trace, plan and costs."""
    from elbowroom.cli.step_files import load_step
    from elbowroom.cli.step_pages import write_page

    trace_file, plan_file, costs_file = given
    step = load_step(
        terminal, journal, trace_file=trace_file, plan_file=plan_file, hardware=hardware, costs_file=costs_file
    )
    write_page(terminal, step, html)


def _load_step(
    terminal: Terminal, trace_file: Path | None, plan_file: Path | None, hardware: str, costs_file: Path | None
) -> _Step:
    """Load the step of the given files."""
    if trace_file is None:
        return _Step(plan=None if plan_file is None else files.load(Plan, plan_file))
    trace = load_trace(trace_file)
    plan = None if plan_file is None else load_plan(plan_file, trace)
    costs = find_costs(terminal, trace, hardware, costs_file)
    return _Step(trace=trace, costs=costs) if plan is None else _forecast(*apply_cuts(trace, costs, plan))


def _check_same_step(journal: Path, step: _Step, given: Path | None) -> None:
    """Check that a trace or plan is of the step that a run has written beside its journal, if it has.

    Raises:
        UsageError: it is of another step.
    """
    from elbowroom.ir.digest import digest

    found = load_run_step(journal)
    of_step = "" if step.plan is None else step.plan.trace_digest
    if step.trace is not None:
        of_step = digest(step.trace)
    if found is not None and of_step and of_step != digest(found.trace):
        raise UsageError(
            f"{given} is of trace {of_step[:12]}, but {journal} is of {digest(found.trace)[:12]}, which it holds: "
            f"leave {given} out"
        )


def _load_own_step(journal: Path) -> _Step:
    """Load the step that a run has written beside its journal; an empty one if there is none."""
    found = load_run_step(journal)
    return _Step() if found is None else _forecast(found.trace, found.costs, found.plan, found.host_bytes)


def _forecast(trace: Trace, costs: Costs, plan: Plan, host_bytes: int | None = None) -> _Step:
    from elbowroom.planner.bounds.bound import bound_plan
    from elbowroom.simulator.planned import PreparedTrace

    replay = PreparedTrace(trace, costs)
    return _Step(
        trace=trace,
        costs=costs,
        plan=plan,
        forecast=replay.run(plan, placement=replay.place(plan)),
        bound_seconds=bound_plan(trace, costs, plan, host_bytes),
    )
