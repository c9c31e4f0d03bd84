"""Ctrl-C is not lost where Python code runs that no exception can leave: as objects die."""

from __future__ import annotations

import collections
import ctypes
import functools
import operator
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.native import library


def wait_after(function: Callable[[], Any]) -> None:
    """Call a function, and wait for an exception that comes after it."""
    function()
    threading.Event().wait(5)


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Calls a function with Ctrl-C pending, and expects it to be raised afterwards."""

    def call(function: Callable[[], Any]) -> None:
        # In C, as Python looks for signals between two instructions.
        calls = map(operator.call, [ctypes.pythonapi.PyErr_SetInterrupt, function])
        with pytest.raises(KeyboardInterrupt):
            wait_after(functools.partial(collections.deque, calls, maxlen=0))

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield call
    signal.signal(signal.SIGINT, former)


def test_a_saved_tensor_is_given_up(interrupted: Callable[[Callable[[], Any]], None]) -> None:
    retired: collections.deque[tuple[int, None]] = collections.deque()
    calls: list[int] = []
    box = [library.load().PackedTensor(retired.append, lambda: calls.append(len(retired)), 7, None, 0)]
    interrupted(box.clear)
    assert list(retired) == [(7, None)] and calls == [1]


def test_a_callback_of_a_weak_reference(interrupted: Callable[[Callable[[], Any]], None]) -> None:
    box, calls = [Hidden()], list[object]()
    callback = library.load().ShieldedFunction(calls.append)
    reference = weakref.ref(box[0], callback)
    interrupted(box.clear)
    assert calls == [reference]


def test_a_call_that_is_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    ignored: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: ignored.append(str(unraisable.exc_value)))

    def fail(times: int) -> None:
        calls.append(times)
        if len(calls) <= times:
            raise ArithmeticError("of a signal's handler")

    shielded = library.load().ShieldedFunction(fail)
    with pytest.raises(ArithmeticError):
        wait_after(functools.partial(shielded, 1))
    assert calls == [1, 1] and not ignored
    calls.clear()
    with pytest.raises(ArithmeticError):
        wait_after(functools.partial(shielded, 2))
    assert calls == [2, 2] and ignored == ["of a signal's handler"]
