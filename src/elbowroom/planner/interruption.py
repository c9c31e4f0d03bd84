"""Ctrl-C during a search ends the search, whose best plan so far is used; inside a user's step it ends the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_ENDS_SEARCH = ContextVar("ends_search", default=True)


def ends_search() -> bool:
    """Tell whether an interruption only ends the search that it comes in."""
    return _ENDS_SEARCH.get()


@contextlib.contextmanager
def passing_interruptions() -> Iterator[None]:
    """Return a context in which searches raise `KeyboardInterrupt`, as the user's own code does."""
    before = _ENDS_SEARCH.set(False)
    try:
        yield
    finally:
        _ENDS_SEARCH.reset(before)
