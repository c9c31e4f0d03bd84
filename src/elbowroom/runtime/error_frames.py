"""Lets go of what the frames of an error hold."""

from __future__ import annotations

import contextlib
import inspect
import pathlib

from elbowroom.errors import ElbowroomError

PACKAGE = str(pathlib.Path(__file__).parents[1])

SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of functions that may go on after an error, but would not if their frames were cleared."""


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, whose variables hold tensors, and of those of Elbowroom's that it is chained to.

    Generators of the program are left alone.
    """
    found: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop()
        found.append(each)
        place = each.__traceback__
        while place is not None:
            code = place.tb_frame.f_code
            if not code.co_flags & SUSPENDABLE or code.co_filename.startswith(PACKAGE):
                with contextlib.suppress(RuntimeError):  # it runs
                    place.tb_frame.clear()
            place = place.tb_next
        chained = (each.__cause__, each.__context__)
        pending += [other for other in chained if isinstance(other, ElbowroomError) and other not in found]
