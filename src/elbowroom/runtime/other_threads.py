"""Threads beside that of the step: what they may list, and waiting for their ops, which keep state in memory."""

from __future__ import annotations

import sys
import threading
import time

import torch

from elbowroom.hooks.module_paths import ENGINE
from elbowroom.native import library

LONGEST_WAIT_SECONDS = 1.0
"""Two ops that wait for each other's memory wait so long before one is refused."""

SECONDS_BETWEEN_LOOKS = 0.0005


def may_look(thread: int) -> bool:
    """Tell whether this thread may list what the thread of a step holds, which may be changing that just now.

    It is that thread itself, or one for which it waits in a backward pass: one of autograd's, or one that calls back
    and that Python did not start, such as that of a collective with whose result a communication hook goes on.
    """
    own = threading.get_ident()
    if own == thread or torch._C._current_graph_task_id() != -1:
        return True
    registered = threading._active.get(own)  # type: ignore[attr-defined]  # `current_thread` would add it
    if registered is not None and not isinstance(registered, threading._DummyThread):
        return False
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code is ENGINE


class OtherThreads:
    """Ops of other threads that use model state, from the moment at which this object is made."""

    def __init__(self) -> None:
        self._native = library.load()
        self._begun, self._running = self._native.count_uses_elsewhere()
        self._deadline: float | None = None

    def wait(self) -> bool:
        """Wait for a moment. Returns False, without waiting, if there was no such op since, or the time is up."""
        begun, running = self._native.count_uses_elsewhere()
        if not running and not self._running and begun == self._begun:
            return False
        self._begun, self._running = begun, running
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + LONGEST_WAIT_SECONDS
        if now >= self._deadline:
            return False
        time.sleep(SECONDS_BETWEEN_LOOKS)
        return True
