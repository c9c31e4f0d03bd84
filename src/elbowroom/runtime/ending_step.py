"""Finishes a step at its end or after an error."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def ending_step(finish: Callable[[], None]) -> Iterator[None]:
    """Return a context that calls `finish` at its end. An error of `finish` does not replace an error of the step.

    `finish` is not called at interpreter shutdown, because the threads that transfers wait for are gone.
    """
    try:
        yield
    except BaseException:
        if sys.is_finalizing():
            raise
        try:
            finish()
        except Exception:
            logger.exception("after the error that ended the step, finishing the step failed, too")
        raise
    finish()
