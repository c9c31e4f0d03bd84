"""Which threads run a step of some room."""

from __future__ import annotations

import threading

_threads: list[int] = []


def note_begin() -> None:
    """Note that this thread begins a step."""
    _threads.append(threading.get_ident())


def note_end(thread: int) -> None:
    """Note that a step ends that a thread has begun."""
    if thread in _threads:
        _threads.remove(thread)


def runs_step() -> bool:
    """Tell whether this thread runs a step of any room."""
    return threading.get_ident() in _threads
