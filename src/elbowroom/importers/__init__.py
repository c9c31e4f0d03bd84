"""Imports logs of other systems as a Trace and Costs: one file per format, entry point `read`.

Such logs have ops, memory blocks and times, but no autograd. `_log.py` adds saves and needs that let every block move
between its uses, as in the systems that wrote the logs. The steps can then be planned and simulated here.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys

from elbowroom._family import get, names
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import Link
from elbowroom.ir.trace import Trace

ENTRY_POINT = "read"


class LoggedRelease(enum.StrEnum):
    """Release time of a block."""

    PROGRAM = "program"
    """When the logged program releases it."""
    LAST_USE = "last_use"
    """After the last op that uses it, as a planner that knows the step could; results of the step stay."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Imported step.

    Attributes:
        costs: op times as logged, without hook and overhead seconds; block sizes are not rounded.
    """

    trace: Trace
    costs: Costs


def list_formats() -> tuple[str, ...]:
    """Return the names of all formats."""
    return names(sys.modules[__name__])


def read_log(
    format_name: str,
    path: str | os.PathLike[str],
    *,
    release: LoggedRelease = LoggedRelease.PROGRAM,
    link: Link | None = None,
) -> Imported:
    """Read a log file.

    Args:
        format_name: one of `list_formats()`.
        release: release time of blocks.
        link: link to the tier below, which logs do not record; by default that of the machine on which the format's
            public logs were recorded.

    Raises:
        UnknownMember: the format does not exist.
        UsageError: the file does not exist.
        TraceError: the log is malformed, truncated or inconsistent; the message names the line and the op.
    """
    imported: Imported = get(sys.modules[__name__], format_name, ENTRY_POINT)(path, release=release, link=link)
    return imported
