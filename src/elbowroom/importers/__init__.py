"""Logs of other systems -> Trace and Costs: one file a format, entry point `read`.

A foreign log knows ops, blocks of memory and times, but nothing of autograd. `_log.py` puts in the saves and needs that
let every block move between its uses, as in the systems that wrote such logs. What was measured there can then be
planned here, and what another system does with it can be simulated.
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
    """Until when a block counts."""

    PROGRAM = "program"
    """Until the program that was logged let go of it."""
    LAST_USE = "last_use"
    """Until after the last op that uses it, as a planner that knows the step can free it; results of the step stay."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The step in a log.

    Attributes:
        costs: measured op times as logged; no hook or overhead seconds, and blocks are counted as logged, unrounded.
    """

    trace: Trace
    costs: Costs


def list_formats() -> tuple[str, ...]:
    """The names of all formats."""
    return names(sys.modules[__name__])


def read_log(
    format_name: str,
    path: str | os.PathLike[str],
    *,
    release: LoggedRelease = LoggedRelease.PROGRAM,
    link: Link | None = None,
) -> Imported:
    """The log in a file.

    Args:
        format_name: one of `list_formats()`.
        release: until when a block counts.
        link: the path to the tier below, which no log knows; None for that of the machine the format's public logs
            come from.

    Raises:
        UnknownMember: there is no such format.
        UsageError: there is no such file.
        TraceError: it is malformed, cut off, or inconsistent; names the line and the op.
    """
    imported: Imported = get(sys.modules[__name__], format_name, ENTRY_POINT)(path, release=release, link=link)
    return imported
