"""Leaves the callbacks of futures out of the steps that are watched.

A communication hook of DDP ends with `future.then(callback)`. The callback runs in the thread that calls `then` if the
future is done by then, and in one of the backend's otherwise, so its ops would be part of some steps and not of others.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from elbowroom.native import library

_PATCHED = ("then", "add_done_callback")

_lock = threading.RLock()  # the garbage collector may close those of another room meanwhile
_originals: dict[str, Any] = {}
_users = 0


class UnwatchedCallbacks:
    """Until it is closed, ops of callbacks that are added to a future are part of no step, whichever thread runs them.

    What they write in the step's own thread is reported, as by any op.
    """

    def __init__(self) -> None:
        global _users
        self._is_open = True
        with _lock:
            _users += 1
            if _users == 1:
                for name in _PATCHED:
                    _originals[name] = getattr(torch._C.Future, name)
                    setattr(torch._C.Future, name, _wrap(_originals[name]))

    def close(self) -> None:
        """Watch callbacks that are added from now on."""
        global _users
        with _lock:
            if not self._is_open:
                return
            self._is_open = False
            _users -= 1
            if _users == 0:
                for name in _PATCHED:
                    setattr(torch._C.Future, name, _originals.pop(name))


def _wrap(add: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add)
    def add_unwatched(future: torch._C.Future[Any], callback: Callable[..., Any]) -> Any:
        def call(done: torch._C.Future[Any]) -> Any:
            set_aside = library.load().set_aside
            former = set_aside(True)
            try:
                return callback(done)
            finally:
                set_aside(former)

        return add(future, call)

    return add_unwatched
