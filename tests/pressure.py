"""Pressure at every allocation, for tests of what happens under any."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elbowroom.ir.events import PressureRaised
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.step_runner import StepRunner

EVERYTHING = 1 << 40


def let_everything_go(runner: StepRunner, nbytes: int) -> None:
    """All that may leave leaves, in the way that the policy likes."""
    runner._drain()
    if runner.state.phase is Phase.UNPRESSURED:
        runner._start_managing()
    runner._deferred.catch_up()
    runner._executor.perform(runner._machine.feed(PressureRaised(EVERYTHING, 0)))
    runner._deferred.set_marks()


def let_results_go(runner: StepRunner, nbytes: int) -> None:
    """The same, and model state and all results of ops that no op uses just now leave as well."""
    let_everything_go(runner, nbytes)
    runner._guard.move_state(EVERYTHING)
    runner._guard._move_results(EVERYTHING)


def ask_at_every_request(
    monkeypatch: pytest.MonkeyPatch, make_room: Callable[[StepRunner, int], None] = let_everything_go
) -> None:
    """Have `make_room` called for each request, though there may be enough room."""

    def ask(runner: StepRunner, requested_bytes: int, missing_bytes: int) -> bool:
        with runner._lock:
            if runner.state.phase.has_budget:
                make_room(runner, requested_bytes)
                runner._guard.ledger.set_limit(0)  # a runner that learns that room is short has set another one
        return False

    def begin(runner: StepRunner) -> None:
        runner._guard.ledger.set_limit(0)
        if make_room is let_results_go:
            runner._guard._pager._activate()
            runner.state.watcher.note_results(1)

    monkeypatch.setattr(StepRunner, "begin", begin)
    monkeypatch.setattr(StepRunner, "make_room", ask)
