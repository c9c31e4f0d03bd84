"""`elbowroom max-batch`: finds the largest and the fastest batch within a memory size."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from elbowroom._folders import check_writable
from elbowroom.cli.documents import save_document
from elbowroom.cli.parameters import (
    Hardware,
    Json,
    Managed,
    Output,
    Picture,
    Slicing,
    Spec,
    Strategy,
    WorkloadOptions,
    with_workload_options,
)
from elbowroom.cli.sources import (
    capture_spec,
    count_bytes,
    find_profile,
    note_share,
    price_trace,
    read_amount,
)
from elbowroom.cli.terminal import Advance, Terminal, open_terminal
from elbowroom.errors import Infeasible, UsageError
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.ir.costs import Costs
    from elbowroom.ir.hardware import HardwareProfile
    from elbowroom.ir.trace import Trace
    from elbowroom.planner.comparison.batches import Batches, Trial
    from elbowroom.planner.options import Manages

Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        help="Bytes the step may hold: 12GiB or 12G (1024), 12GB (1000), or 90% of the device that --hardware names. "
        "Default: all of it. Nothing is subtracted: leave room for other programs.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("max-batch")(with_workload_options(find_max_batch, without=("batch",)))


def find_max_batch(
    spec: Spec,
    memory: Memory = None,
    hardware: Hardware = "this",
    strategy: Strategy = "auto",
    manages: Managed = "activations",
    slices: Slicing = "exact",
    picture: Picture = None,
    output: Output = None,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Find the largest batch that trains and the one of highest throughput, with a plan and without."""
    from elbowroom.cli.pictures import check_picture, draw_throughput
    from elbowroom.planner.comparison.batches import Batches, try_batches
    from elbowroom.planner.options import find_managed, find_strategy
    from elbowroom.planner.problem import find_slices

    with open_terminal(as_json) as terminal:
        check_picture(picture)
        check_writable(output, picture)
        managed = find_managed(strategy, manages)
        find_strategy(strategy, managed)
        sliceable = find_slices(slices)
        if memory is not None:
            read_amount("--memory", memory, device_bytes=1 << 40)
        if os.path.exists(spec):
            raise UsageError(f"{spec} is a file: a captured trace has one batch, and this needs many; name a SPEC")
        profile = find_profile(terminal, hardware)
        memory_bytes = read_amount("--memory", memory or "100%", device_bytes=count_bytes(profile))
        note_share(terminal, "--memory", memory or "100%", memory_bytes)
        host_bytes = profile.tiers[1].capacity_bytes if len(profile.tiers) > 1 else None
        search = functools.partial(
            try_batches, memory_bytes=memory_bytes, strategy=strategy, host_bytes=host_bytes, manages=managed,
            slices=sliceable,
        )  # fmt: skip
        trials, stopped = _run(terminal, spec, options, profile, search, managed)
        found = Batches(memory_bytes=memory_bytes, host_bytes=host_bytes, strategy=strategy, trials=trials)
        if trials:
            title = f"{spec} within {format_bytes(memory_bytes)} on {profile.name}"
            terminal.show_facts(title, list_facts(found))
            terminal.show(Text(), make_table(found))
            fields = {"name": spec, "hardware": profile.name, **list_fields(found), "complete": stopped is None}
            if picture is not None:
                draw_throughput(found, title, picture)
            save_document(output, "max-batch", fields)
            for written in filter(None, (picture, output)):
                terminal.show_text(f"written to {written}")
            terminal.write_document("max-batch", **fields)
        if stopped is not None:
            raise stopped


def _run(
    terminal: Terminal,
    spec: str,
    options: Mapping[str, Any],
    profile: HardwareProfile,
    search: functools.partial[Iterator[Trial]],
    managed: Manages,
) -> tuple[tuple[Trial, ...], BaseException | None]:
    """Return the trials by batch, and the error that prevented the others."""
    from elbowroom.planner.comparison.batches import MOST_TRIALS
    from elbowroom.planner.interruption import passing_interruptions
    from elbowroom.planner.options import Manages

    trials: list[Trial] = []
    silent = _Silent(True, sys.stderr)
    captured: list[int] = []

    with passing_interruptions(), terminal.progress(f"trying batches of {spec}") as advance:

        def load(batch: int, budget_bytes: int | None = None) -> tuple[Trace, Costs]:
            share = min(0.95, len(trials) / MOST_TRIALS)
            advance(f"capturing a batch of {batch}", share)
            trace = capture_spec(silent, spec, {**options, "batch": batch}, budget_bytes)
            costs = price_trace(silent if captured else terminal, trace, profile)
            captured.append(batch)
            advance(f"planning a batch of {batch}", share)
            return trace, costs

        moves_state = managed is Manages.EVERYTHING
        grouped = functools.partial(load, budget_bytes=search.keywords["memory_bytes"])
        running = search(load, load_grouped=grouped if moves_state else None)
        try:
            for trial in running:
                advance(f"tried a batch of {trial.batch}", len(trials) / MOST_TRIALS)
                trials.append(trial)
        except (KeyboardInterrupt, Exception) as error:
            stopped: BaseException | None = error
        else:
            stopped = None
    if isinstance(stopped, Infeasible) and not trials:
        terminal.note(f"{spec} does not fit, not even with a batch of {captured[-1]}")
    return tuple(sorted(trials, key=lambda trial: trial.batch)), stopped


class _Silent(Terminal):
    """Terminal without progress bars, for the captures of a search that shows one bar of its own."""

    @contextlib.contextmanager
    def progress(self, title: str, *, steady: bool = True) -> Iterator[Advance]:
        yield lambda what, share: None

    def note(self, text: str) -> None:
        pass


def list_facts(found: Batches) -> list[tuple[str, str, str]]:
    """Return table rows for the largest and the fastest batch, with a plan and without."""
    rows: list[tuple[str, str, str]] = []
    tried = {trial.batch: trial for trial in found.trials}
    for what, trial in (("largest batch", found.largest), ("largest batch, plain", found.largest_plain)):
        if trial is None:
            rows.append((what, "none", "not even the smallest batch fits"))
        else:
            rows.append((what, str(trial.batch), _say_next(tried.get(trial.batch + 1))))
    for what, trial, rate in (
        ("fastest batch", found.fastest, found.fastest and found.fastest.planned_rate),
        ("fastest batch, plain", found.fastest_plain, found.fastest_plain and found.fastest_plain.plain_rate),
    ):
        if trial is not None:
            rows.append((what, str(trial.batch), f"{_format_rate(rate or 0.0)} samples/s"))
    return rows


def _say_next(trial: Trial | None) -> str:
    if trial is None:
        return "whether one more fits was not tried"
    if trial.planned.needed_host_bytes and trial.planned.outcome is None:
        return f"one more would put {format_bytes(trial.planned.needed_host_bytes)} below the device, which is too much"
    return "one more does not fit"


def make_table(found: Batches) -> Table:
    """Return a table with one row per tried batch: the plain step, then the planned one.

    If a step does not fit, its peak is the memory that it would need.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("\nbatch", justify="right", no_wrap=True)
    heads = ("plain\npeak", "plain\nsamples/s", "\npeak", "\nsamples/s", "step over\nplain", "\nmoved", "recom-\nputed")
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    marked = {trial.batch for trial in (found.largest, found.fastest) if trial is not None}
    for trial in found.trials:
        table.add_row(*_cells(trial), style="bold" if trial.batch in marked else None)
    return table


def _cells(trial: Trial) -> tuple[str, ...]:
    outcome = trial.planned.outcome
    plain_rate = _format_rate(trial.plain_rate) if trial.fits_plain else "too large"
    head = str(trial.batch), format_bytes(trial.plain.peak_bytes), plain_rate
    if outcome is None:
        return *head, format_bytes(trial.planned.needed_bytes), "too large", "", "", ""
    return (
        *head,
        format_bytes(outcome.peak_bytes),
        _format_rate(trial.planned_rate),
        f"{outcome.over(trial.plain.step_seconds):.3f} x",
        format_bytes(outcome.moved_bytes) if outcome.moved_bytes else "-",
        format_seconds(outcome.recompute_seconds) if outcome.recompute_seconds else "-",
    )


def _format_rate(rate: float) -> str:
    """Format a rate with about four significant digits."""
    return f"{rate:.1f}" if rate >= 100 else f"{rate:.2f}" if rate >= 10 else f"{rate:.3f}"


def list_fields(found: Batches) -> dict[str, Any]:
    """Return the fields of the JSON document."""
    return {
        "memory_bytes": found.memory_bytes,
        "host_bytes": found.host_bytes,
        "strategy": found.strategy,
        "largest_batch": _batch(found.largest),
        "largest_plain_batch": _batch(found.largest_plain),
        "fastest_batch": _batch(found.fastest),
        "fastest_plain_batch": _batch(found.fastest_plain),
        "trials": [
            {
                "batch": trial.batch,
                "smallest_bytes": trial.smallest_bytes,
                "needed_bytes": trial.planned.needed_bytes,
                "planning_seconds": trial.planned.planning_seconds,
                "fits": trial.planned.outcome is not None,
                "samples_per_second": trial.planned_rate,
                "plan": None if trial.planned.outcome is None else dataclasses.asdict(trial.planned.outcome),
                "fits_plain": trial.fits_plain,
                "plain_samples_per_second": trial.plain_rate,
                "plain": dataclasses.asdict(trial.plain),
            }
            for trial in found.trials
        ],
    }


def _batch(trial: Trial | None) -> int | None:
    return None if trial is None else trial.batch
