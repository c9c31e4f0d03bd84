"""Tells for how long a thread has waited, and where: a rank that waits for ever looks alive from outside."""

from __future__ import annotations

import os
import sys
import threading
import time

_BUSY_SHARE = 0.01
"""Share of a core above which other threads of the process may be what the thread waits for."""

_LIBRARIES = tuple(f"{os.sep}{each}{os.sep}" for each in ("torch", "elbowroom", "contextlib.py"))


class ThreadActivity:
    """Watches the thread that makes it, from another one.

    `look` has to be called from time to time. On systems without /proc the thread never counts as waiting.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._status = f"/proc/self/task/{threading.get_native_id()}/status"
        self._switches = -1
        self._since = time.monotonic()
        self._cpu_seconds = 0.0

    def look(self) -> float:
        """Return for how many seconds the thread has waited, and no other thread has worked."""
        now = time.monotonic()
        switches = _count_switches(self._status)
        used = time.process_time() - time.thread_time()  # without the thread that looks
        is_busy = used - self._cpu_seconds > _BUSY_SHARE * max(1.0, now - self._since)
        if switches != self._switches or switches < 0 or is_busy:
            self._switches = switches
            self._since = now
            self._cpu_seconds = used
        return now - self._since

    def describe_place(self) -> str:
        """Return the file and line at which the thread is, of the program if it is in PyTorch."""
        frame = innermost = sys._current_frames().get(self._ident)
        while frame is not None and any(each in frame.f_code.co_filename for each in _LIBRARIES):
            frame = frame.f_back
        frame = frame or innermost
        if frame is None:
            return "an unknown place"
        return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def _count_switches(path: str) -> int:
    """Return how often a thread has given up its core; -1 if that is not known."""
    try:
        with open(path) as file:
            return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
    except OSError:
        return -1
