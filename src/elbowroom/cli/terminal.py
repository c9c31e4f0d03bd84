"""Output of a command: tables on stdout, or one JSON document with `--json`; progress on stderr."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from elbowroom.progress import Advance as Advance
from elbowroom.progress import drawing_on, list_columns


class Terminal:
    """Output streams of one command. Made by `open_terminal`."""

    def __init__(self, as_json: bool, stdout: TextIO) -> None:
        self.as_json = as_json
        self._stdout = stdout
        # Files and pipes have no width; 120 columns hold every table.
        self._out = Console(file=stdout, width=None if stdout.isatty() else 120)
        self._err = Console(stderr=True)

    def show(self, *renderables: RenderableType) -> None:
        """Print renderables, unless `--json` was given."""
        if not self.as_json:
            self._out.print(*renderables)

    def show_facts(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print a heading and a table of (name, value, remark), unless `--json` was given."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for row in rows:
            table.add_row(*row)
        self.show(Text(title, style="bold"))
        self.show(table)

    def show_text(self, text: str) -> None:
        """Print text verbatim, without wrapping or markup, unless `--json` was given."""
        if not self.as_json:
            self._out.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        # Wrap on a terminal only; a file gets one note per line.
        self._err.print(Text(text, style="dim"), soft_wrap=not self._err.is_terminal)

    def write_document(self, command: str, **fields: Any) -> None:
        """Print the result as one JSON document on stdout, if `--json` was given."""
        if self.as_json:
            json.dump({"command": command, **fields}, self._stdout, indent=2, allow_nan=False)
            self._stdout.write("\n")
            self._stdout.flush()

    @contextlib.contextmanager
    def progress(self, title: str, *, steady: bool = True) -> Iterator[Advance]:
        """Show a progress bar on stderr while the body runs; without a terminal, print one line per stage.

        Args:
            title: the work in progress.
            steady: whether a thread animates the bar. False while times are measured: then it is drawn only on updates.
        """
        if not self._err.is_terminal:
            yield self._line_by_line(title)
            return
        bar = Progress(*list_columns(), console=self._err, transient=True, auto_refresh=steady)
        with bar, drawing_on(bar):
            task = bar.add_task(title, total=None)

            def advance(what: str, share: float) -> None:
                bar.update(task, description=f"{title}: {what}", total=1.0, completed=share, refresh=not steady)

            bar.refresh()
            yield advance

    def _line_by_line(self, title: str) -> Advance:
        self.note(title)
        last_stage = ""

        def advance(what: str, share: float) -> None:
            nonlocal last_stage
            if what != last_stage:
                last_stage = what
                self.note(f"  {what}")

        return advance


@contextlib.contextmanager
def open_terminal(as_json: bool) -> Iterator[Terminal]:
    """Open the terminal of one command. With `as_json`, other output to stdout is redirected to stderr."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # where the locale has not all characters, such as "C"
            stream.reconfigure(errors="replace")
    terminal = Terminal(as_json, sys.stdout or io.StringIO())  # it may be closed
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield terminal
