"""Runs independent tasks on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from elbowroom._threads import can_start_threads

Result = TypeVar("Result")


def run_all(tasks: Sequence[Callable[[], Result]], stop: Callable[[], None] = lambda: None) -> list[Result]:
    """Run tasks in threads and return their results in order. A task may run twice: its result must be the same.

    If no thread can be started, as under a tight memory limit, they run one after the other.

    Args:
        stop: called when one task fails or the wait is interrupted, so that the others end early.

    Raises:
        KeyboardInterrupt: no further task is started, and the running ones have ended.
    """
    cores = min(len(tasks), os.cpu_count() or 1)
    if cores > 1 and can_start_threads():
        pool = ThreadPoolExecutor(max_workers=cores)
        try:
            if (running := _submit(pool, tasks)) is not None:
                return [each.result() for each in running]
        except BaseException:
            stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C, too: it may come before Python knows a thread
    return [task() for task in tasks]


def _submit(pool: ThreadPoolExecutor, tasks: Sequence[Callable[[], Result]]) -> list[Future[Result]] | None:
    """Begin tasks; None if no thread could be started."""
    try:
        return [pool.submit(task) for task in tasks]
    except RuntimeError:
        return None
