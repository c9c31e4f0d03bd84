"""`elbowroom layout`: offsets for buffers of known lifetimes, compared with online allocators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from elbowroom._family import get
from elbowroom._folders import check_writable
from elbowroom.cli.parameters import CostsFile, Hardware, Json, Output, Picture
from elbowroom.cli.pictures import check_picture, draw_layout
from elbowroom.cli.sources import check_belongs, find_costs, load_plan, load_trace, read_amount
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.layout import allocators
from elbowroom.layout.lay_out import DEFAULT, list_allocators
from elbowroom.units import format_bytes, format_seconds

Allocator = Annotated[
    str,
    typer.Option(
        "--allocator",
        help=f"What chooses the offsets: {', '.join(list_allocators())}.",
        autocompletion=lambda: list(list_allocators()),
    ),
]


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("layout")(show_layout)


def show_layout(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE_OR_CSV",
            help="Written by `elbowroom capture`; or a table id,lower,upper,size whose name ends in .csv.",
        ),
    ],
    allocator: Allocator = DEFAULT,
    capacity: Annotated[
        str | None, typer.Option("--capacity", help="Bytes the arena may take: 8GiB. Any amount if not given.")
    ] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Keep the offsets that the table has.")] = False,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            help="Written by `elbowroom plan`: lay out the blocks of the planned step, workspace included.",
        ),
    ] = None,
    hardware: Hardware = "this",
    costs_file: CostsFile = None,
    output: Output = None,
    picture: Picture = None,
    as_json: Json = False,
) -> None:
    """Lay out the buffers of a step in one arena; show its size, the lower bound, and the sizes of other allocators."""
    from elbowroom.layout.lay_out import lay_out
    from elbowroom.layout.pools import POOLS
    from elbowroom.layout.requests import serve
    from elbowroom.layout.tables import write_layout

    with open_terminal(as_json) as terminal:
        check_picture(picture)
        check_writable(output, picture, inputs=(source, plan_file, costs_file))
        _check_options(plan_file, hardware, costs_file, pinned)
        get(allocators, allocator, "assign")
        capacity_bytes = None if capacity is None else read_amount("--capacity", capacity)
        if plan_file is None:
            buffers = load_buffers(source, pinned)
        else:
            buffers = list_planned(terminal, source, plan_file, hardware, costs_file)
        with terminal.progress(f"laying out {len(buffers)} buffers"):
            begin = time.perf_counter()
            layout = lay_out(buffers, allocator, capacity_bytes)
            seconds = time.perf_counter() - begin
        pools = {name: serve(buffers, make()) for name, make in POOLS.items()}
        terminal.show_facts(f"{source}, laid out by {allocator}", list_rows(buffers, layout, seconds))
        rows = [(name, format_bytes(nbytes), _compare(layout.arena_bytes, nbytes)) for name, nbytes in pools.items()]
        terminal.show_facts("The same requests, served one by one", rows)
        if output is not None:
            write_layout(output, buffers, layout)
            terminal.show_text(f"written to {output}")
        if picture is not None:
            time_unit, classes = _describe_buffers(source, is_planned=plan_file is not None)
            title = f"{source.name}, laid out by {allocator}"
            draw_layout(buffers, layout, title, picture, time_unit=time_unit, classes=classes)
            terminal.show_text(f"drawn into {picture}")
        terminal.write_document("layout", allocator=allocator, **describe(buffers, layout, seconds), pools=pools)


def _check_options(plan_file: Path | None, hardware: str, costs_file: Path | None, is_pinned: bool) -> None:
    """Check that each option means something.

    Raises:
        UsageError: names one that does not.
    """
    if plan_file is None:
        check_belongs("--plan", hardware, costs_file)
    elif is_pinned:
        raise UsageError("--pinned keeps the offsets of a table, and a plan has none: leave it out")


def load_buffers(source: Path, is_pinned: bool = False) -> tuple[Buffer, ...]:
    """Load the buffers of a table or of a trace.

    Raises:
        UsageError: there is no such file, or it has no offsets to keep.
        TraceError: it is damaged; names the line or the place.
    """
    from elbowroom.layout.lifetimes import list_buffers
    from elbowroom.layout.tables import read_buffers

    if source.suffix.lower() == ".csv":
        return read_buffers(source, is_pinned=is_pinned)
    if is_pinned:
        raise UsageError(f"--pinned keeps the offsets of a table, and {source} is a trace: leave it out")
    return list_buffers(load_trace(source))


def _describe_buffers(source: Path, *, is_planned: bool) -> tuple[str, dict[int, str]]:
    """Return the unit of the lifetimes, and the class of each buffer by its id, as far as they are known."""
    if source.suffix.lower() == ".csv":
        return "as in the table", {}
    if is_planned:
        return "requests", {}
    return "ticks", {storage.id: str(storage.role) for storage in load_trace(source).storages}


def list_planned(
    terminal: Terminal, source: Path, plan_file: Path, hardware: str, costs_file: Path | None
) -> tuple[Buffer, ...]:
    """Return the blocks of a step under a plan.

    Raises:
        UsageError: a file is missing, or no trace.
        TraceError: a file is damaged, or the plan is for another trace.
    """
    from elbowroom.simulator.planned import PreparedTrace

    if source.suffix.lower() == ".csv":
        raise UsageError(f"--plan: {source} is a table; a plan goes with the trace that it was made for")
    trace = load_trace(source)
    plan = load_plan(plan_file, trace)
    trace, costs, plan = apply_cuts(trace, find_costs(terminal, trace, hardware, costs_file), plan)
    return PreparedTrace(trace, costs).list_blocks(plan)


def describe(buffers: tuple[Buffer, ...], layout: Layout, seconds: float) -> dict[str, Any]:
    """Return the figures of a layout for JSON."""
    return {
        "buffers": len(buffers),
        "arena_bytes": layout.arena_bytes,
        "bound_bytes": layout.bound_bytes,
        "is_optimal": layout.is_optimal,
        "fragmentation": 1 - layout.bound_bytes / layout.arena_bytes if buffers else 0.0,
        "seconds": seconds,
        "offsets": list(layout.offsets),
    }


def list_rows(buffers: tuple[Buffer, ...], layout: Layout, seconds: float) -> list[tuple[str, str, str]]:
    """Return the figures of a layout as table rows."""
    found = describe(buffers, layout, seconds)
    proof = "proven to be the smallest" if layout.is_optimal else "not proven to be the smallest"
    return [
        ("buffers", str(len(buffers)), ""),
        ("arena", format_bytes(layout.arena_bytes), f"{layout.arena_bytes} bytes, {proof}"),
        ("lower bound", format_bytes(layout.bound_bytes), f"{layout.bound_bytes} bytes are live at the peak"),
        ("fragmentation", f"{found['fragmentation']:.3%}", "of the arena, when the most is there"),
        ("time", format_seconds(seconds), ""),
    ]


def _compare(arena_bytes: int, nbytes: int) -> str:
    return f"the layout takes {1 - arena_bytes / nbytes:.1%} less" if nbytes else ""
