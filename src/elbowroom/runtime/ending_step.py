"""Finishes a step at its end or after an error."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator

from elbowroom.errors import ElbowroomError

logger = logging.getLogger(__name__)


class StepAborted(BaseException):
    """Aborts a step that its program has given up."""


@contextlib.contextmanager
def ending_step(finish: Callable[[], None]) -> Iterator[None]:
    """Return a context that calls `finish` at its end. An error of `finish` does not replace an error of the step, but
    what a signal's handler raises in `finish` reaches a program that has given the step up.

    `finish` is not called at interpreter shutdown, because the threads that transfers wait for are gone.
    """
    try:
        yield
    except BaseException as failure:
        if sys.is_finalizing():
            raise
        try:
            finish()
        except Exception as error:
            if isinstance(failure, StepAborted) and not isinstance(error, (ElbowroomError, RuntimeError)):
                raise
            logger.exception("after the error that ended the step, finishing the step failed, too")
        raise
    finish()
