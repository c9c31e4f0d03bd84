"""Log of one step's replays, and the storages that its copies are of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from elbowroom.ir.timeline import Activity, Lane
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.spill_queue import SpillCopy
from elbowroom.runtime.transfers import ThreadTransfers, Transfers

MOST_REPLAYS = 100_000
"""Limit on what one step records."""

LEAST_SECONDS = 2e-5
"""Shorter waits and replays are left out: asking whether a copy is done takes some microseconds, too."""


class ActivityLog:
    """Records what a step does beside its ops."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._replays: list[Activity] = []

    def begin(self) -> None:
        """Set the beginning of the step to now."""
        self._origin = time.perf_counter()

    def name_transfer(self, copy: Copy, storage: int) -> None:
        """Note the storage that the last transfer of a copy moves."""
        if isinstance(copy, SpillCopy) and copy.last is not None:
            copy.last.subject = storage

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Return a context in which a segment is replayed."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if len(self._replays) < MOST_REPLAYS:
                self._replays.append(Activity(Lane.RECOMPUTE, -1, begin, time.perf_counter()))

    def finish(self, transfers: Transfers) -> tuple[Activity, ...]:
        """Return replays, transfers and waits in order of their begin, in seconds since the step began."""
        # Of copies on streams, the host knows when they were requested, not when they ran.
        moved = transfers.list_activities() if isinstance(transfers, ThreadTransfers) else []
        found = [*moved, *self._replays]
        self._replays = []
        shifted = [
            Activity(each.lane, each.subject, max(0.0, each.begin - self._origin), each.end - self._origin)
            for each in found
            if each.end > self._origin
        ]
        brief = {Lane.STALL, Lane.RECOMPUTE}
        kept = [each for each in shifted if each.lane not in brief or each.end - each.begin > LEAST_SECONDS]
        return tuple(sorted(kept, key=lambda each: (each.begin, each.lane, each.subject)))
