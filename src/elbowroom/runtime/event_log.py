"""Reads the extension's log of saves, needs and releases that were not reported to the policy."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.online import Moment

NO_STORAGE = -1
"""Id in events of tensors that never move, because they are not a plain block of bytes or outlive the step. Moves
planned for the tick of such an event still take place."""

Logged = StorageSaved | StorageNeeded | StorageFreed
"""Events that are logged."""

EVENTS: tuple[type[Logged], ...] = (StorageSaved, StorageNeeded, StorageFreed)
"""Event types by their numbers in the log."""

SAVED, NEEDED, FREED = range(3)


def read_log(
    entries: Iterable[Any], begin: float, present: Container[int]
) -> Iterator[tuple[Logged, Moment, int | None]]:
    """Read the entries that `SavedTensors.tell` returns.

    Args:
        begin: start of the step, on the clock of `time.perf_counter`.
        present: ids of the storages that autograd still holds.

    Yields:
        Each event; its time and the live bytes at that time; and, for a save of a storage that autograd has released
        since, the size of the storage.
    """
    for event, storage, tick, nbytes, seconds, busy_seconds, live_bytes in entries:
        is_gone = event == SAVED and storage >= 0 and storage not in present
        moment = Moment(seconds - begin, busy_seconds, live_bytes, live_bytes)
        yield EVENTS[event](storage, tick), moment, nbytes if is_gone else None
