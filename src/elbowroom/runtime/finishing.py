"""The end of a step, whether it was reached or an error ended it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def finishing(finish: Callable[[], None]) -> Iterator[None]:
    """Call `finish` in the end. An error that ended the step is not replaced by one of finishing it.

    A step that the interpreter's end interrupts is not finished: the threads that moves wait for are gone.
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
