"""What a command says: tables on stdout for people or one JSON document for programs; progress on stderr."""

from __future__ import annotations

import contextlib
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
    """Where one command's words go. Made by `open_terminal`."""

    def __init__(self, as_json: bool, stdout: TextIO) -> None:
        self.as_json = as_json
        self._stdout = stdout
        # Files and pipes get lines as wide as the tables are, not as wide as a terminal that is not there.
        self._out = Console(file=stdout, width=None if stdout.isatty() else 120)
        self._err = Console(stderr=True)

    def show(self, *renderables: RenderableType) -> None:
        """Print to people; with `--json` nothing."""
        if not self.as_json:
            self._out.print(*renderables)

    def show_facts(self, title: str, rows: Sequence[tuple[str, str, str]]) -> None:
        """Print a heading, and a table of names and values with a remark beside some; with `--json` nothing."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for row in rows:
            table.add_row(*row)
        self.show(Text(title, style="bold"))
        self.show(table)

    def show_text(self, text: str) -> None:
        """Print text as it is, neither wrapped nor read as markup; with `--json` nothing."""
        if not self.as_json:
            self._out.print(Text(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr."""
        # A terminal breaks lines between words; a file has each note in a line.
        self._err.print(Text(text, style="dim"), soft_wrap=not self._err.is_terminal)

    def write_document(self, command: str, **fields: Any) -> None:
        """With `--json`, print the result as the one JSON document on stdout."""
        if self.as_json:
            json.dump({"command": command, **fields}, self._stdout, indent=2, allow_nan=False)
            self._stdout.write("\n")
            self._stdout.flush()

    @contextlib.contextmanager
    def progress(self, title: str, *, steady: bool = True) -> Iterator[Advance]:
        """A progress bar on stderr while the body runs; where that is not a terminal, a line for every new stage.

        Args:
            title: what is being done.
            steady: whether the bar moves by itself. Where times are being measured it must not: it is drawn only when
                it is told of something.
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
        said = ""

        def advance(what: str, share: float) -> None:
            nonlocal said
            if what != said:
                said = what
                self.note(f"  {what}")

        return advance


@contextlib.contextmanager
def open_terminal(as_json: bool) -> Iterator[Terminal]:
    """A terminal for one command. With `as_json`, whatever else is printed meanwhile goes to stderr."""
    terminal = Terminal(as_json, sys.stdout)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        yield terminal
