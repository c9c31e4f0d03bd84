"""Timeline: the work of the compute stream, the link and the disk during one step."""

from __future__ import annotations

import dataclasses
import enum


class Lane(enum.StrEnum):
    """Resource that is busy, or reason for which compute waits."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    STALL = "stall"
    OFFLOAD = "offload"
    RELOAD = "reload"
    DISK = "disk"


@dataclasses.dataclass(frozen=True, slots=True)
class Activity:
    """Work of one lane during some seconds of a step.

    Attributes:
        subject: id of the storage that moves or is waited for; index in `Trace.ops` of an op; -1 for a replay, and for
            a storage that is not known.
        begin, end: seconds since the step began.
    """

    lane: Lane
    subject: int
    begin: float
    end: float
