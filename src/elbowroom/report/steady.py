"""Summarizes the steady state of a journal: the steps after planning has settled."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter

from elbowroom.ir.journal import Journal, Mode, StepRecord


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Figures of the latest consecutive steps of one mode.

    Attributes:
        mode: their mode.
        steps: number of steps.
        seconds: median step time.
        peak_bytes, resident_bytes: maximum; None if not measured.
        stall_seconds: median.
        offloaded_bytes, reloaded_bytes, recomputed: of the last step.
    """

    mode: Mode
    steps: int
    seconds: float
    peak_bytes: int | None
    resident_bytes: int | None
    stall_seconds: float
    offloaded_bytes: int
    reloaded_bytes: int
    recomputed: int


def find_steady(journal: Journal) -> Steady | None:
    """Return figures of the steady state; None for an empty journal.

    Uses the planned (or plain) steps after the last capture, or else the last steps of any mode, since the budget has
    changed.
    """
    if not journal.steps:
        return None
    budget_bytes = journal.steps[-1].budget_bytes
    latest = itertools.takewhile(lambda record: record.budget_bytes == budget_bytes, reversed(journal.steps))
    records = tuple(latest)[::-1]
    # Steps before the last capture followed another plan, or none.
    last_capture = max((index for index, record in enumerate(records) if record.mode is Mode.CAPTURE), default=-1)
    for wanted, since in (
        ((Mode.PLANNED, Mode.PLAIN), last_capture + 1),
        ((Mode.PLANNED, Mode.PLAIN), 0),
        ((records[-1].mode,), 0),
    ):
        chosen = [record for record in records[since:] if record.mode in wanted]
        if chosen:
            return _summarize([record for record in chosen if record.mode is chosen[-1].mode])
    return None


def count_modes(journal: Journal) -> dict[Mode, int]:
    """Return the number of steps in each mode, in the order of first occurrence."""
    return dict(Counter(record.mode for record in journal.steps))


def _summarize(records: list[StepRecord]) -> Steady:
    last = records[-1]
    return Steady(
        mode=last.mode,
        steps=len(records),
        seconds=statistics.median(record.seconds for record in records),
        peak_bytes=Journal(steps=tuple(records)).peak_bytes,
        resident_bytes=max((each.resident_bytes for each in records if each.resident_bytes is not None), default=None),
        stall_seconds=statistics.median(record.stall_seconds for record in records),
        offloaded_bytes=last.offloaded_bytes,
        reloaded_bytes=last.reloaded_bytes,
        recomputed=last.recomputed,
    )
