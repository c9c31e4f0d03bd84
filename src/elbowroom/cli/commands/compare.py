"""`elbowroom compare`: compares strategies over budgets."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from elbowroom._folders import check_writable
from elbowroom.cli.documents import save_document
from elbowroom.cli.lists import read_budgets, read_strategies
from elbowroom.cli.parameters import (
    AMOUNTS,
    CostsFile,
    Hardware,
    HostMemory,
    Json,
    Managed,
    Output,
    Picture,
    Slicing,
    TraceOrSpec,
    WorkloadOptions,
    with_workload_options,
)
from elbowroom.cli.sources import (
    count_bytes,
    find_costs_and_profile,
    find_trace,
    group_optimizer,
    is_spec,
    keep_all,
    read_host_memory,
)
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from pathlib import Path

    from elbowroom.ir.costs import Costs
    from elbowroom.ir.trace import Trace
    from elbowroom.planner.comparison.strategies_compared import Comparison, Entry
    from elbowroom.planner.slicing.choice import Slices

Budgets = Annotated[
    str,
    typer.Option("--budgets", help=f"FROM:TO:COUNT, or a list: 4GiB,60%peak,80%. Each is {AMOUNTS}."),
]
Strategies = Annotated[
    str,
    typer.Option(
        "--strategies", help="all, or a list, with options where wanted: auto,autoswap:score=doa,mode=zero_overhead"
    ),
]


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("compare")(with_workload_options(compare_strategies))


def compare_strategies(
    source: TraceOrSpec,
    budgets: Budgets = "20%peak:100%peak:9",
    strategies: Strategies = "all",
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    host_memory: HostMemory = None,
    manages: Managed = "activations",
    slices: Slicing = "none",
    picture: Picture = None,
    output: Output = None,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Plan one step within several budgets by several strategies, and show what each costs.

    With --manages everything, strategies that cannot move the model's state keep it; bounds are for those that can.
    With --slices, budgets below the smallest for whole ops are planned in slices, and the bound is that of these
    slices. Ctrl-C shows the results so far.
    """
    from elbowroom.cli.pictures import check_picture
    from elbowroom.planner.comparison.strategies_compared import Comparison, even_out
    from elbowroom.planner.options import Manages, find_managed
    from elbowroom.planner.problem import find_slices, pose
    from elbowroom.simulator.simulate import simulate

    with open_terminal(as_json) as terminal:
        check_picture(picture)
        check_writable(output, picture, inputs=(source, costs_file))
        # Check the arguments before anything is captured or measured.
        read_budgets(budgets, device_bytes=1 << 40, peak_bytes=1 << 40)
        managed, sliceable = find_managed("auto", manages), find_slices(slices)
        asked, host_bytes = read_strategies(strategies), read_host_memory(host_memory)
        trace = find_trace(terminal, source, options)
        costs, profile = find_costs_and_profile(terminal, trace, hardware, costs_file)
        device_bytes = None if profile is None else count_bytes(profile)
        plain = simulate(trace, costs, keep_all(costs, 0))
        within = read_budgets(budgets, device_bytes=device_bytes, peak_bytes=plain.peak_bytes)
        if managed is Manages.EVERYTHING and is_spec(source) and costs_file is None and profile is not None:
            trace, costs = group_optimizer(terminal, source, options, within[0], profile)
        problem = pose(trace, costs, 1, manages=managed)
        comparison = Comparison(
            name=trace.name,
            trace_digest=costs.trace_digest,
            profile_name=costs.profile_name,
            plain_peak_bytes=plain.peak_bytes,
            plain_seconds=plain.step_seconds,
            manages=str(managed),
            slices=sliceable,
            smallest_bytes=problem.floor.peak_bytes,
            entries=(),
        )
        entries, stopped = _run(terminal, trace, costs, within, asked, host_bytes, managed, sliceable)
        comparison = dataclasses.replace(comparison, entries=even_out(entries))
        if entries:
            _show(terminal, comparison, picture, output, is_complete=stopped is None)
        if stopped is not None:
            raise stopped


def _run(
    terminal: Terminal,
    trace: Trace,
    costs: Costs,
    budgets: tuple[int, ...],
    strategies: tuple[str, ...],
    host_bytes: int | None,
    manages: str,
    slices: Slices,
) -> tuple[tuple[Entry, ...], BaseException | None]:
    """Return the entries, and the error that prevented the others."""
    from elbowroom.planner.comparison.strategies_compared import compare
    from elbowroom.planner.interruption import passing_interruptions

    entries: list[Entry] = []
    places = [(budget, strategy) for budget in budgets for strategy in strategies]
    running = compare(trace, costs, budgets, strategies, host_bytes=host_bytes, manages=manages, slices=slices)
    try:
        with passing_interruptions(), terminal.progress(f"comparing on {trace.name}") as advance:
            for budget, strategy in places:
                done = len(entries)
                what = f"{strategy} within {format_bytes(budget)} ({done + 1} of {len(places)})"
                advance(what, done / len(places))
                entries.append(next(running))
    except (KeyboardInterrupt, Exception) as error:
        return tuple(entries), error
    return tuple(entries), None


def _show(
    terminal: Terminal, comparison: Comparison, picture: Path | None, output: Path | None, *, is_complete: bool
) -> None:
    """Print the comparison, and write the requested files."""
    from elbowroom.cli.pictures import draw_front

    terminal.show(*_head(comparison))
    terminal.show(make_table(comparison))
    terminal.show(*(Text("\n" + line) for line in list_refusals(comparison)))
    fields = {**list_fields(comparison), "complete": is_complete}
    if picture is not None:
        draw_front(comparison, picture)
    save_document(output, "compare", fields)
    for written in filter(None, (picture, output)):
        terminal.show_text(f"written to {written}")
    terminal.write_document("compare", **fields)


def _head(comparison: Comparison) -> tuple[Text, ...]:
    """Return the lines above the table: the plain step and the smallest budget that works."""
    from elbowroom.planner.slicing.choice import Slices

    facts = (
        f"plain step {format_seconds(comparison.plain_seconds)} at {format_bytes(comparison.plain_peak_bytes)}; "
        f"smallest budget that works {format_bytes(comparison.smallest_bytes)}"
    )
    if comparison.slices is not Slices.NONE:
        facts += " with whole ops"
    if comparison.manages != "activations":
        facts += f"; plans move {comparison.manages}"
    return Text(f"{comparison.name} on {comparison.profile_name}", style="bold"), Text("\n" + facts + "\n")


def make_table(comparison: Comparison) -> Table:
    """Return a table with one row per entry, under one row per budget with its bound; highlights the fastest entries.

    Moved bytes count both ways; "over bound" is the excess of the step time over the lower bound.
    """
    from elbowroom.planner.comparison.strategies_compared import find_fastest

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("budget\n  strategy", overflow="fold")
    for head in ("\npeak", "step over\nplain", "\nmoved", "recom-\nputed", "planned\nin", "over\nbound"):
        table.add_column(head, justify="right", no_wrap=True)
    plain = comparison.plain_seconds
    for budget in comparison.list_budgets():
        entries = comparison.find_entries(budget_bytes=budget)
        share = f"{budget / comparison.plain_peak_bytes:.0%}peak" if comparison.plain_peak_bytes else ""
        bound = (
            f"{entries[0].bound_seconds / plain:.3f} x" if plain and math.isfinite(entries[0].bound_seconds) else "-"
        )
        table.add_row(f"{share} {format_bytes(budget)}", "", bound, "", "", "", "bound", style="cyan")
        fastest = find_fastest(entries)
        for entry in entries:
            table.add_row(*_cells(entry), style="bold" if entry is fastest else None)
    return table


def _cells(entry: Entry) -> tuple[str, ...]:
    outcome, attempt = entry.outcome, entry.attempt
    planned = format_seconds(attempt.planning_seconds)
    if outcome is None and attempt.refusal:
        return f"  {entry.strategy}", "refused", "-", "", "", planned, ""
    if outcome is None:
        needs = format_bytes(attempt.needed_host_bytes or attempt.needed_bytes)
        needs += " below" if attempt.needed_host_bytes else ""
        return f"  {entry.strategy}", f"needs {needs}", "does not fit", "", "", planned, ""
    return (
        f"  {entry.strategy}",
        format_bytes(outcome.peak_bytes),
        f"{outcome.over(entry.plain_seconds):.3f} x",
        format_bytes(outcome.moved_bytes) if outcome.moved_bytes else "-",
        format_seconds(outcome.recompute_seconds) if outcome.recompute_seconds else "-",
        planned,
        f"{outcome.over(entry.bound_seconds) - 1:.1%}",
    )


def list_refusals(comparison: Comparison) -> list[str]:
    """Explain empty cells: for each strategy its first error, and the number of cells that failed."""
    lines = []
    for strategy in comparison.list_strategies():
        entries = comparison.find_entries(strategy=strategy)
        reasons = [entry.attempt.refusal for entry in entries if entry.attempt.refusal]
        if reasons:
            lines.append(f"{strategy} refused {len(reasons)} of {len(entries)} budgets: {reasons[0]}")
    return lines


def list_fields(comparison: Comparison) -> dict[str, Any]:
    """Return the fields of the JSON document, with one object per entry.

    `front` lists the Pareto-optimal entries (peak and seconds). Figures of an entry that does not fit, and figures that
    are not finite, are null.
    """
    from elbowroom.planner.comparison.strategies_compared import find_front

    front = find_front(comparison.entries)
    return {
        "name": comparison.name,
        "digest": comparison.trace_digest,
        "hardware": comparison.profile_name,
        "plain_peak_bytes": comparison.plain_peak_bytes,
        "plain_step_seconds": comparison.plain_seconds,
        "smallest_budget_bytes": comparison.smallest_bytes,
        "manages": comparison.manages,
        "slices": comparison.slices,
        "entries": [_fields(entry) for entry in comparison.entries],
        "front": [{"budget_bytes": entry.budget_bytes, "strategy": entry.strategy} for entry in front],
    }


def _fields(entry: Entry) -> dict[str, Any]:
    outcome = entry.outcome
    return {
        "budget_bytes": entry.budget_bytes,
        "strategy": entry.strategy,
        "fits": outcome is not None,
        "refusal": entry.attempt.refusal or None,
        "needed_bytes": None if entry.attempt.refusal else entry.attempt.needed_bytes,
        "needed_host_bytes": entry.attempt.needed_host_bytes,
        "bound_seconds": entry.bound_seconds if math.isfinite(entry.bound_seconds) else None,
        "planning_seconds": entry.attempt.planning_seconds,
        "plan": None if outcome is None else {
            **dataclasses.asdict(outcome),
            "slowdown": _finite(outcome.over(entry.plain_seconds)),
            "gap": _finite(outcome.over(entry.bound_seconds) - 1),
        },
    }  # fmt: skip


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
