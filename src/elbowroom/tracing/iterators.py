"""Keeps a captured step from advancing iterators, which could not be undone."""

from __future__ import annotations

import io
import threading
from typing import Any


class IteratorTaken(RuntimeError):
    """A captured step tried to advance an iterator."""


def is_iterator(value: object) -> bool:
    """Return True for an iterator (an object that yields each item once), except for files."""
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, StandIn))


class StandIn:
    """Proxy of an iterator that refuses to advance it in the thread that made the proxy, until the capture is over.

    Attributes:
        iterator: the original.
        was_asked: whether the step tried to advance it.
        is_over: whether the capture is over. The step may have kept the proxy, which then forwards to the original.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator
        self.was_asked = False
        self.is_over = False
        self._thread = threading.get_ident()

    def __iter__(self) -> StandIn:
        return self

    def __next__(self) -> Any:
        self._refuse()
        return next(self.iterator)

    def __getattr__(self, name: str) -> Any:
        if name in ("close", "send", "throw"):  # of a generator
            self._refuse()
        return getattr(self.iterator, name)

    def _refuse(self) -> None:
        if self.is_over or threading.get_ident() != self._thread:
            return
        self.was_asked = True
        raise IteratorTaken(f"it takes the next item of a {type(self.iterator).__name__}, which could not be undone")
