"""Ctrl-C during a search ends the search, whose best plan so far is used; inside a user's step it ends the program."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType

_ENDS_SEARCH = ContextVar("ends_search", default=True)


def ends_search() -> bool:
    """Tell whether an interruption only ends the search that it comes in."""
    return _ENDS_SEARCH.get()


@contextlib.contextmanager
def passing_interruptions() -> Iterator[None]:
    """Return a context in which searches raise `KeyboardInterrupt`, as the user's own code does.

    One that comes while loops are compiled or loaded is lost in a callback of ctypes, and is raised at the end.
    """
    before = _ENDS_SEARCH.set(False)
    try:
        with _raising_what_was_lost():
            yield
    finally:
        _ENDS_SEARCH.reset(before)


@contextlib.contextmanager
def _raising_what_was_lost() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        has_come = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if has_come:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
    if has_come:
        raise KeyboardInterrupt
