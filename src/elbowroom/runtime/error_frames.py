"""Lets go of what the frames of an error hold."""

from __future__ import annotations

import traceback

from elbowroom.errors import ElbowroomError


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, whose variables hold tensors, and of those of Elbowroom's that it is chained to."""
    found: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop()
        found.append(each)
        traceback.clear_frames(each.__traceback__)
        chained = (each.__cause__, each.__context__)
        pending += [other for other in chained if isinstance(other, ElbowroomError) and other not in found]
