"""What takes long says so: once, on stderr, and only then. No torch."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import pty
import select
import subprocess
import sys
import threading
import time

import pytest

from elbowroom import progress
from elbowroom.progress import announcing, drawing_on

NAME = "elbowroom-progress"


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been said yet."""
    screen = progress._Screen()
    monkeypatch.setattr(progress, "_screen", lambda: screen)


def wait_for(is_true: object) -> None:
    """Until it is, ten seconds at most."""
    end = time.monotonic() + 10
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_short_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with announcing("planning a step", after_seconds=60):
        assert [thread.name for thread in threading.enumerate()].count(NAME) == 1
    assert NAME not in [thread.name for thread in threading.enumerate()]
    assert caplog.records == []


def test_what_is_long_is_a_warning_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        with announcing("planning a step", f"net {number}", after_seconds=0.05) as advance:
            advance("something", 0.5)
            wait_for(lambda: caplog.records)
            time.sleep(0.01)
    with announcing("laying out buffers", after_seconds=0):
        wait_for(lambda: len(caplog.records) > 1)
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", "planning a step (net 0) takes longer than 2 s"),
        ("WARNING", "laying out buffers takes longer than 2 s"),
    ]


def test_a_body_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    monkeypatch.setattr(sys, "stderr", Terminal())
    with contextlib.suppress(KeyboardInterrupt), announcing("planning a step", after_seconds=0):
        wait_for(lambda: progress._screen()._bars)
        raise KeyboardInterrupt
    assert progress._screen()._bars is None
    wait_for(lambda: threading.active_count() == before)  # who draws the bar ends by itself


def test_without_a_thread_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with announcing("planning a step", after_seconds=0) as advance:
        advance("something", 0.5)
    assert caplog.records == []


def test_a_terminal_has_one_block_of_bars(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with announcing("planning a step", after_seconds=0):
        wait_for(lambda: progress._screen()._bars)
        bars = progress._screen()._bars
        assert bars is not None
        with announcing("compiling loops", after_seconds=0) as advance:
            wait_for(lambda: len(bars.tasks) == 2)
            advance("the first", 0.25)
            assert [(task.description, task.completed) for task in bars.tasks] == [
                ("planning a step", 0.0),
                ("compiling loops: the first", 0.25),
            ]
        assert len(bars.tasks) == 1
        sys.stdout.write("what the program prints stays where it was\n")
    assert progress._screen()._bars is None
    assert "compiling loops: the first" in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "what the program prints" not in sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert caplog.records == []


def test_who_draws_already_is_not_drawn_over(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from rich.console import Console
    from rich.progress import Progress

    bars = Progress(console=Console(file=io.StringIO()))
    with drawing_on(bars), announcing("planning a step", after_seconds=0):
        wait_for(lambda: bars.tasks)
        with drawing_on(None), announcing("compiling loops", after_seconds=0):
            time.sleep(0.01)
        assert [task.description for task in bars.tasks] == ["planning a step"]
    assert bars.tasks == [] and caplog.records == [] and progress._screen()._bars is None


PLAN = """
import sys
from elbowroom import _numba_loops, progress
_numba_loops._find_cache = lambda: sys.argv[1]
progress.PATIENCE = 0.05
import numpy as np
from elbowroom.layout.orders import _find_pressures
found = np.zeros(1, np.int64)
for _ in range(2):
    _find_pressures(found * 0, found * 0 + 1, found * 0, found * 0 + 7, found)
    print(found[0])
"""


def run(folder: pathlib.Path, stderr: int) -> str:
    """A process that compiles one function, or loads it."""
    command = [sys.executable, "-c", PLAN, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, check=True, timeout=120)
    assert done.stdout == "7\n7\n"
    return done.stderr


def test_compiling_says_so_where_nothing_was_kept(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path, subprocess.PIPE).splitlines()
    assert len(said) == 1 and said[0].startswith("compiling loops (kept for the next time; `elbowroom build`")
    assert run(tmp_path, subprocess.PIPE) == ""


def test_compiling_draws_a_bar_on_a_terminal(tmp_path: pathlib.Path) -> None:
    ours, theirs = pty.openpty()
    try:
        run(tmp_path, theirs)
        assert select.select([ours], [], [], 0)[0], "nothing was drawn"
        drawn = os.read(ours, 1 << 16).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "compiling loops" in drawn and "takes longer" not in drawn


def test_the_line_is_seen_without_any_configuration() -> None:
    assert logging.lastResort is not None and logging.lastResort.level <= logging.WARNING
