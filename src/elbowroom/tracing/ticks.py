"""Ticks: counts the entries of a trace while it is recorded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Ticks:
    """Counts entries.

    Attributes:
        now: tick of the next entry.
    """

    def __init__(self) -> None:
        self.now = 0
        self._regions = 0
        self._watched: list[Callable[[], bool]] = []

    def watch(self, is_over: Callable[[], bool]) -> None:
        """Call a function at each entry until it returns True."""
        self._watched.append(is_over)

    def close(self) -> None:
        """Call no function any more."""
        self._watched = []

    def take(self) -> int:
        """Return the tick of an entry, which ends it."""
        if self._watched:
            self._watched = [each for each in self._watched if not each()]
        self.now += 1
        return self.now - 1

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Return a context in which a compiled region runs. Its entry comes at the end, and it frees inputs before."""
        self._regions += 1
        try:
            yield
        finally:
            self._regions -= 1

    def find_release(self) -> int:
        """Return the first tick at whose beginning what is freed now is gone."""
        return self.now + (self._regions > 0)
