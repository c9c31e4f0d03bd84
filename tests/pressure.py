"""Pressure at every allocation, for tests of what happens under any."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elbowroom.ir.events import PressureRaised
from elbowroom.runtime.online_engine import OnlineEngine

EVERYTHING = 1 << 40


def let_everything_go(engine: OnlineEngine, nbytes: int) -> None:
    """All that may leave leaves, in the way that the policy likes."""
    engine._drain()
    if engine._is_logging:
        engine._catch_up()
    engine._carry_out(engine._machine.feed(PressureRaised(EVERYTHING, 0)))


def ask_at_every_request(
    monkeypatch: pytest.MonkeyPatch, make_room: Callable[[OnlineEngine, int], None] = let_everything_go
) -> None:
    """Have `make_room` called for each request, though there may be enough room."""

    def ask(engine: OnlineEngine, requested_bytes: int, missing_bytes: int) -> bool:
        with engine._lock:
            if engine._is_running:
                make_room(engine, requested_bytes)
                engine.account._ledger.set_limit(0)  # who learns that room is short has set another one
        return False

    def begin(engine: OnlineEngine) -> None:
        engine.account._ledger.set_limit(0)

    monkeypatch.setattr(OnlineEngine, "begin", begin)
    monkeypatch.setattr(OnlineEngine, "free", ask)
