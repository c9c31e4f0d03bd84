"""Pressure at every op, for tests of what happens under any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elbowroom.ir.events import PressureRaised
from elbowroom.runtime.online_engine import OnlineEngine
from tests.speeds import list_engines

EVERYTHING = 1 << 40


def let_everything_go(engine: OnlineEngine, nbytes: int, func: Any) -> None:
    """In the place of `OnlineEngine.take_room`: all that may leave leaves, in the way that the policy likes."""
    with engine._lock:
        engine._drain()
        if engine._past is not None:
            engine._catch_up()
        engine._carry_out(engine._machine.feed(PressureRaised(EVERYTHING, 0)))
    engine.account.reserve(nbytes)


def ask_at_every_op(
    monkeypatch: pytest.MonkeyPatch, take_room: Callable[[OnlineEngine, int, Any], None] = let_everything_go
) -> None:
    """Have `take_room` make room for every op, though there may be enough."""
    for engine in list_engines():
        monkeypatch.setattr(engine.account_class, "reserve_within", lambda account, nbytes: False)
    monkeypatch.setattr(OnlineEngine, "take_room", take_room)
