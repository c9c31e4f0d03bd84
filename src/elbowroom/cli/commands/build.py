"""`elbowroom build`: machine code for this machine, ahead of the first step that needs it."""

from __future__ import annotations

import time

import typer

from elbowroom.cli.parameters import Json
from elbowroom.cli.terminal import open_terminal
from elbowroom.units import format_seconds


def register(app: typer.Typer) -> None:
    """Put this command into the program."""
    app.command()(build)


def build(as_json: Json = False) -> None:
    """Compile what else the first plan waits for, and the library in C++ that watches ops: one to two minutes, once.

    Optional: without the library (it needs a C++ compiler) Python does the same, slower.
    """
    from elbowroom._compiler import is_made
    from elbowroom.compilation import compile_loops
    from elbowroom.progress import drawing_on
    from elbowroom.quick.library import build_library, find_library, load

    with open_terminal(as_json) as terminal:
        begin = time.perf_counter()
        with terminal.progress("compiling the planner's loops") as advance:
            compile_loops(advance)
        loops_seconds, begin = time.perf_counter() - begin, time.perf_counter()
        was_there = is_made(find_library())
        with terminal.progress("compiling the library that watches ops"), drawing_on(None):
            library = build_library()
        is_usable = load() is not None
        what = "was there already" if was_there else f"compiled in {format_seconds(time.perf_counter() - begin)}"
        terminal.show_text(f"the planner's loops: ready in {format_seconds(loops_seconds)}")
        terminal.show_text(f"{library}: {what}")
        terminal.write_document(
            "build", library=str(library), was_there=was_there, is_usable=is_usable, loops_seconds=loops_seconds
        )
