"""The steps of all rooms that run now."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator


class _Beginning(threading.local):
    is_early = False


_beginning = _Beginning()


@dataclasses.dataclass(eq=False)
class OpenStep:
    """A step that has begun.

    Attributes:
        is_ending: whether its end has begun.
        is_early: whether it has begun where the last one ended, and not at a call of the program.
        thread, owner: id and object of the thread that began it.
    """

    context: contextlib.AbstractContextManager[None]
    is_ending: bool = False
    is_early: bool = dataclasses.field(default_factory=lambda: _beginning.is_early)
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    owner: threading.Thread = dataclasses.field(default_factory=threading.current_thread)

    def __post_init__(self) -> None:
        _open[id(self)] = self


_open: weakref.WeakValueDictionary[int, OpenStep] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def beginning_early() -> Iterator[None]:
    """Return a context in which steps of this thread begin where the last one ended."""
    _beginning.is_early = True
    try:
        yield
    finally:
        _beginning.is_early = False


def runs_step() -> bool:
    """Tell whether this thread runs a step of any room that has begun at a call of the program."""
    steps = [ref() for ref in _open.valuerefs()]  # a list: other threads begin steps meanwhile
    own = threading.current_thread()
    return any(each is not None and not each.is_early and each.owner is own for each in steps)
