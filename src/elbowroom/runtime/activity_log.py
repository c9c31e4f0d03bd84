"""Log of one step's moves, waits and replays, with their times."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from elbowroom.ir.timeline import Activity, Lane
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.spill_queue import SpillCopy, SpillJob

MOST_ACTIVITIES = 100_000
"""Limit on what one step records; further activities are not."""

LEAST_SECONDS = 2e-5
"""Shorter waits and replays are left out: asking whether a copy is done takes some microseconds, too."""


class ActivityLog:
    """Records what a step does beside its ops.

    The times of copies are those of the thread that makes them; copies on streams of a device are not recorded.
    """

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._jobs: list[tuple[Lane, int, SpillJob]] = []
        self._spans: list[Activity] = []

    def begin(self) -> None:
        """Set the beginning of the step to now."""
        self._origin = time.perf_counter()

    def note_copy(self, lane: Lane, storage: int, copy: Copy) -> None:
        """Record the last transfer of a copy, which has begun."""
        is_spilled = isinstance(copy, SpillCopy) and copy.last is not None
        if is_spilled and len(self._jobs) < MOST_ACTIVITIES:
            assert isinstance(copy, SpillCopy) and copy.last is not None
            self._jobs.append((lane, storage, copy.last))

    @contextlib.contextmanager
    def noting(self, lane: Lane, storage: int = -1) -> Iterator[None]:
        """Return a context whose duration is recorded."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if len(self._spans) < MOST_ACTIVITIES:
                self._spans.append(Activity(lane, storage, begin, time.perf_counter()))

    def finish(self) -> tuple[Activity, ...]:
        """Return the activities in order of their begin, and forget them; transfers under way are left out."""
        found = [
            Activity(lane, storage, job.begin, job.end) for lane, storage, job in self._jobs if job.is_done and job.end
        ]
        found += [each for each in self._spans if each.end - each.begin > LEAST_SECONDS]
        self._jobs = []
        self._spans = []
        shifted = (
            Activity(each.lane, each.subject, each.begin - self._origin, each.end - self._origin) for each in found
        )
        return tuple(sorted(shifted, key=lambda each: (each.begin, each.lane, each.subject)))
