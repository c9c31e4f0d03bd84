"""`elbowroom build`: compiles for this machine ahead of the first step."""

from __future__ import annotations

import pathlib
import time
from concurrent.futures import ThreadPoolExecutor

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

    Takes a minute or two, once, and needs a C++ compiler.
    """
    from elbowroom.compilation import compile_loops

    with open_terminal(as_json) as terminal, ThreadPoolExecutor(max_workers=1) as pool:
        extension = pool.submit(_build_extension) if has_torch() else None
        begin = time.perf_counter()
        with terminal.progress("compiling the planner's loops") as advance:
            compile_loops(advance)
        loops_seconds = time.perf_counter() - begin
        terminal.show_text(f"the planner's loops: ready in {format_seconds(loops_seconds)}")
        if extension is None:
            terminal.show_text("the extension that watches steps: not compiled, since there is no PyTorch here")
            terminal.write_document(
                "build", library=None, was_there=False, is_usable=False, loops_seconds=loops_seconds
            )
            return
        from elbowroom.native.library import load

        with terminal.progress("compiling the extension that watches steps"):
            library, was_there, seconds = extension.result()
        is_usable = load() is not None
        what = "was there already" if was_there else f"compiled in {format_seconds(seconds)}"
        terminal.show_text(f"{library}: {what}")
        terminal.write_document(
            "build", library=str(library), was_there=was_there, is_usable=is_usable, loops_seconds=loops_seconds
        )


def _build_extension() -> tuple[pathlib.Path, bool, float]:
    """Compile the extension. Return its file, whether it was there already, and the seconds taken."""
    from elbowroom.native.library import NATIVE, build_library, is_built
    from elbowroom.progress import drawing_on

    begin = time.perf_counter()
    was_there = is_built(NATIVE)
    with drawing_on(None):
        library = build_library(NATIVE)
    return library, was_there, time.perf_counter() - begin
