"""Starts threads where memory may be short."""

from __future__ import annotations

import threading

START_SECONDS = 2.0
"""A thread that has not begun after this time counts as dead. It may still begin."""


class _Begun(threading.Event):
    """Set when a thread begins."""

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(START_SECONDS if timeout is None else timeout):
            raise RuntimeError("can't start new thread: it has not begun")
        return True


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    `Thread.start` alone waits for ever if the system starts the thread but refuses memory to Python in it.

    Raises:
        RuntimeError: no thread can be started now.
    """
    vars(thread)["_started"] = _Begun()  # what `Thread.start` waits for
    try:
        thread.start()
    except MemoryError as error:
        raise RuntimeError("can't start new thread: no memory") from error
    except KeyError as error:  # the thread has begun, but the handler of a signal raised an exception
        raise error.__context__ or error from None


def can_start_threads() -> bool:
    """Tell whether a thread can be started now."""
    thread = threading.Thread(target=int, name="elbowroom-try", daemon=True)
    try:
        start_thread(thread)
    except RuntimeError:
        return False
    thread.join()
    return True
