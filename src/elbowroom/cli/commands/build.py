"""`elbowroom build`: compiles for this machine ahead of the first step."""

from __future__ import annotations

import time

import typer

from elbowroom.cli.parameters import Json
from elbowroom.cli.sources import has_torch
from elbowroom.cli.terminal import open_terminal
from elbowroom.units import format_seconds


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(build)


def build(as_json: Json = False) -> None:
    """Compile the C++ extension and the planner's loops, which the first fit and plan otherwise wait for.

    Takes two minutes, once, and needs a C++ compiler.
    """
    from elbowroom.compilation import compile_loops

    with open_terminal(as_json) as terminal:
        begin = time.perf_counter()
        with terminal.progress("compiling the planner's loops") as advance:
            compile_loops(advance)
        loops_seconds = time.perf_counter() - begin
        terminal.show_text(f"the planner's loops: ready in {format_seconds(loops_seconds)}")
        if not has_torch():
            terminal.show_text("the extension that watches steps: not compiled, since there is no PyTorch here")
            terminal.write_document(
                "build", library=None, was_there=False, is_usable=False, loops_seconds=loops_seconds
            )
            return
        from elbowroom.native.library import NATIVE, build_library, is_built, load
        from elbowroom.progress import drawing_on

        begin = time.perf_counter()
        was_there = is_built(NATIVE)
        with terminal.progress("compiling the extension that watches steps"), drawing_on(None):
            library = build_library(NATIVE)
        is_usable = load() is not None
        what = "was there already" if was_there else f"compiled in {format_seconds(time.perf_counter() - begin)}"
        terminal.show_text(f"{library}: {what}")
        terminal.write_document(
            "build", library=str(library), was_there=was_there, is_usable=is_usable, loops_seconds=loops_seconds
        )
