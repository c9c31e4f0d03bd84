"""Keeps a step from following into worker processes that are forked inside it, such as those of a DataLoader.

A forked process has the watchers of the thread that forked it. A worker never leaves the
parent's `with` block, so it would be watched, and its tensors counted, for as long as it lives. A process that
`os.fork()` makes may go on with the step, and keeps them.
"""

from __future__ import annotations

import functools
from multiprocessing import util

from elbowroom.native import library


@functools.cache
def end_in_workers() -> None:
    """End the step that runs in each process that multiprocessing forks from now on, for good."""
    native = library.load()
    util.register_after_fork(native, lambda native: native.set_watchers(()))
