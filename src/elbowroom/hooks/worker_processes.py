"""Keeps a step from following into worker processes that are forked inside it, such as those of a DataLoader.

A forked process has the watchers of the thread that forked it. A worker never leaves the
parent's `with` block, so it would be watched, and its tensors counted, for as long as it lives. A process that
`os.fork()` makes may go on with the step, and keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing import util

from elbowroom.native import library


@contextlib.contextmanager
def ended_in_workers() -> Iterator[None]:
    """End a step in each process that multiprocessing forks meanwhile."""
    step = _Step()
    util.register_after_fork(step, _Step.end)  # which holds it weakly
    yield
    del step


class _Step:
    def end(self) -> None:
        library.load().set_watchers(())
