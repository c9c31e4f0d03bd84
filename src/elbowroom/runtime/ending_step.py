"""The end of a step, whether the program reached it or an error ended the step."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_step(finish: Callable[[], None]) -> Iterator[None]:
    """Return a context that calls `finish` in the end. What `finish` raises does not replace an error of the step.

    A step that the end of the interpreter interrupts is not finished: the threads that transfers wait for are gone.
    """
    try:
        yield
    except BaseException:
        if sys.is_finalizing():
            raise
        try:
            finish()
        except Exception:
            logger.exception("after the error that ended the step, what it had given up could not be settled")
        raise
    finish()
