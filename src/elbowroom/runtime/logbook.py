"""Keeps the records of a run's steps: all of a short one, and of a long one the first and the latest."""

from __future__ import annotations

from collections import deque

from elbowroom.ir.journal import Journal, StepRecord

RECORDS_KEPT = 1000
"""Of a long run, how many of the first steps, and how many of the latest."""


class Logbook:
    """What becomes a Journal.

    Attributes:
        count: steps so far.
    """

    def __init__(self) -> None:
        self._first: list[StepRecord] = []
        self._latest: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self.count = 0

    def add(self, record: StepRecord) -> None:
        """A step is over."""
        self.count += 1
        if len(self._first) < RECORDS_KEPT:
            self._first.append(record)
        else:
            self._latest.append(record)

    def journal(self) -> Journal:
        """What was measured so far."""
        return Journal(steps=(*self._first, *self._latest))
