"""`elbowroom build`: what watches ops in machine code."""

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
    """Compile what watches ops, once for each PyTorch (a C++ compiler, half a minute). Optional: Python does the same,
    slower."""
    from elbowroom._compiler import is_made
    from elbowroom.quick.library import build_library, find_library, load

    with open_terminal(as_json) as terminal:
        was_there, begin = is_made(find_library()), time.perf_counter()
        if not was_there:
            terminal.note("compiling what watches ops in machine code")
        library = build_library()
        is_usable = load() is not None
        what = "was there already" if was_there else f"compiled in {format_seconds(time.perf_counter() - begin)}"
        terminal.show_text(f"{library}: {what}")
        terminal.write_document("build", library=str(library), was_there=was_there, is_usable=is_usable)
