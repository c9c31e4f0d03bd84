"""Shows work that takes longer than two seconds: with a progress bar on a terminal, elsewhere as one log line.

The line is a warning of this package's logger, once per process for each kind of work. Both go to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from elbowroom._threads import start_thread

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

logger = logging.getLogger(__name__)

Advance = Callable[[str, float], None]
"""Called with the current stage and the share (0 to 1) done."""

PATIENCE = 2.0
"""Seconds before work is shown."""


@contextlib.contextmanager
def announcing(
    what: str, details: str = "", *, after_seconds: float = PATIENCE, steady: bool = True
) -> Iterator[Advance]:
    """Show the work in this context if it takes long.

    Args:
        what: kind of work, such as "planning a step". Outside of a terminal each kind is logged once per process.
        details: details of this work.
        after_seconds: delay before it is shown.
        steady: whether the bar is animated. While times are measured it must not be: it is redrawn only on progress.

    Yields:
        A function to report progress with.
    """
    work = _Work(what=what, details=details, steady=steady)
    timer = threading.Timer(after_seconds, functools.partial(_screen().show, work))
    timer.daemon, timer.name = True, "elbowroom-progress"  # must not keep the process alive after an interruption
    try:
        # If no thread can be started, as under a tight limit on memory, nothing is shown.
        with contextlib.suppress(RuntimeError):
            start_thread(timer)
        yield functools.partial(_screen().advance, work)
    finally:
        timer.cancel()
        _screen().hide(work)
        if timer.ident is not None:
            timer.join()


@contextlib.contextmanager
def drawing_on(bars: Progress | None) -> Iterator[None]:
    """Add to existing bars in this context. None: show nothing, because the caller does."""
    _screen().lent.append(bars)
    try:
        yield
    finally:
        _screen().lent.pop()


@dataclasses.dataclass(slots=True, eq=False)
class _Work:
    """Work in progress.

    Attributes:
        stage: current stage.
        share: share done; None if unknown.
        task: line on the terminal, if there is one.
    """

    what: str
    details: str
    steady: bool
    stage: str = ""
    share: float | None = None
    is_over: bool = False
    task: TaskID | None = None
    bars: Progress | None = None

    def __str__(self) -> str:
        return f"{self.what} ({self.details})" if self.details else self.what

    def describe(self) -> str:
        return f"{self}: {self.stage}" if self.stage else str(self)


class _Screen:
    """Output: one block of lines on the terminal, one line for each work in progress."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bars: Progress | None = None
        self.lent: list[Progress | None] = []
        self._said: set[str] = set()

    def show(self, work: _Work) -> None:
        """Show the work, unless it is over."""
        with self._lock:
            if work.is_over:
                return
            if self.lent:
                work.bars = self.lent[-1]
            elif sys.stderr is not None and sys.stderr.isatty():
                self._bars = work.bars = self._bars or _open_bars(work.steady)
            elif work.what not in self._said:
                self._said.add(work.what)
                logger.warning("%s takes longer than %g s", work, PATIENCE)
            if work.bars is None:
                return
            work.task = work.bars.add_task(work.describe(), total=None)
            self._draw(work)

    def advance(self, work: _Work, stage: str, share: float) -> None:
        """Show its progress."""
        with self._lock:
            work.stage, work.share = stage, share
            self._draw(work)

    def hide(self, work: _Work) -> None:
        """Remove it."""
        with self._lock:
            work.is_over = True
            if work.bars is None or work.task is None:
                return
            work.bars.remove_task(work.task)
            if work.bars is self._bars and not self._bars.task_ids:
                self._bars.stop()
                self._bars = None

    def _draw(self, work: _Work) -> None:
        if work.bars is not None and work.task is not None:
            total = None if work.share is None else 1.0
            work.bars.update(work.task, description=work.describe(), total=total, completed=work.share, refresh=True)


@functools.cache
def _screen() -> _Screen:
    return _Screen()


def _open_bars(steady: bool) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    bars = Progress(
        *list_columns(), console=Console(stderr=True), transient=True, auto_refresh=steady, redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip
    bars.start()
    return bars


def list_columns() -> list[ProgressColumn]:
    """Return the columns of a bar."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    return [SpinnerColumn(), text, BarColumn(bar_width=24), TimeElapsedColumn()]
