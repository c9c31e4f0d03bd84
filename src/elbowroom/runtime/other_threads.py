"""Waits for ops of other threads, which keep the model state that they use in memory until they end."""

from __future__ import annotations

import time

from elbowroom.native import library

LONGEST_WAIT_SECONDS = 1.0
"""Two ops that wait for each other's memory wait so long before one is refused."""

SECONDS_BETWEEN_LOOKS = 0.0005


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
