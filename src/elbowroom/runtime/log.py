"""Reads what autograd did while nobody was told of it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.online import Moment

NO_STORAGE = -1
"""Of a tensor that is no plain block of bytes, or outlives the step: nothing moves it, but what is planned for its tick
happens then."""

Logged = StorageSaved | StorageNeeded | StorageFreed
"""What autograd does."""

EVENTS: tuple[type[Logged], ...] = (StorageSaved, StorageNeeded, StorageFreed)
"""By their numbers in the log of the extension."""

SAVED, NEEDED, FREED = range(3)


def read_log(
    entries: Iterable[Any], begin: float, present: Container[int]
) -> Iterator[tuple[Logged, Moment, int | None]]:
    """Read the entries of `SavedTensors.tell`.

    Args:
        begin: when the step began, on the clock of `time.perf_counter`.
        present: the storages that are still there.

    Yields:
        Each event, when it was, and the bytes of a storage that was saved and is not there any more.
    """
    for event, storage, tick, nbytes, seconds, busy_seconds, live_bytes in entries:
        is_gone = event == SAVED and storage >= 0 and storage not in present
        moment = Moment(seconds - begin, busy_seconds, live_bytes, live_bytes)
        yield EVENTS[event](storage, tick), moment, nbytes if is_gone else None
