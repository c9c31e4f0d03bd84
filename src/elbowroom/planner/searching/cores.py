"""Tasks that do not depend on each other, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_all(tasks: Sequence[Callable[[], Result]], stop: Callable[[], None] = lambda: None) -> list[Result]:
    """What the tasks return, in their order. A task may be begun twice: its result must be the same.

    Where no thread can be had, as under a tight limit on memory, they run one after the other.

    Args:
        stop: called where the others are not waited for, so that they end early.

    Raises:
        KeyboardInterrupt: no task is begun any more, and those that were have ended.
    """
    cores = min(len(tasks), os.cpu_count() or 1)
    if cores > 1:
        pool = ThreadPoolExecutor(max_workers=cores)
        try:
            going = [pool.submit(task) for task in tasks]
        except RuntimeError:  # no more threads
            pool.shutdown(cancel_futures=True)
        else:
            try:
                return [each.result() for each in going]
            except BaseException:
                stop()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
    return [task() for task in tasks]
