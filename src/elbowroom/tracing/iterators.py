"""Keeps a step that is only looked at from taking items of iterators, which cannot be put back."""

from __future__ import annotations

import io
import threading
from typing import Any


class IteratorTaken(RuntimeError):
    """A step asked an iterator for its next item, and was refused."""


def is_iterator(value: object) -> bool:
    """Return True for an iterator (an object that yields each item once), except for files."""
    return hasattr(type(value), "__next__") and not isinstance(value, (io.IOBase, StandIn))


class StandIn:
    """Stands for an iterator, and refuses to take from it in the thread that made the stand-in, until it is over.

    Attributes:
        iterator: what it stands for.
        was_asked: whether an item was to be taken.
        is_over: whether it may be taken from again, should the stand-in have been kept somewhere.
    """

    def __init__(self, iterator: Any) -> None:
        self.iterator, self.was_asked, self.is_over = iterator, False, False
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
        raise IteratorTaken(f"it takes the next item of a {type(self.iterator).__name__}, which could not be put back")
