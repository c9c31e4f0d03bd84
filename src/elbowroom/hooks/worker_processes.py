"""Ends the step in worker processes that are forked inside it, such as those of a DataLoader.

A forked process inherits the watchers of the forking thread. A worker never leaves the parent's `with` block, so it
would be watched, and its tensors counted, for as long as it lives. A process made by `os.fork()` may continue the step,
so it keeps its watchers.
"""

from __future__ import annotations

import functools
from multiprocessing import util

from elbowroom.native import library


@functools.cache
def end_in_workers() -> None:
    """End the running step in each process that multiprocessing forks from now on. Permanent."""
    native = library.load()
    util.register_after_fork(native, lambda native: native.set_watchers(()))
