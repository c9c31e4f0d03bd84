"""The log of saves, needs and releases that the extension keeps while the policy is not told of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.online import Moment

NO_STORAGE = -1
"""Id in events of tensors that never move: those that are not a plain block of bytes, and those that outlive the step.
Moves that are planned for the tick of such an event take place all the same."""

Logged = StorageSaved | StorageNeeded | StorageFreed
"""Events that are logged."""

EVENTS: tuple[type[Logged], ...] = (StorageSaved, StorageNeeded, StorageFreed)
"""By their numbers in the log."""

SAVED, NEEDED, FREED = range(3)


def read_log(
    entries: Iterable[Any], begin: float, present: Container[int]
) -> Iterator[tuple[Logged, Moment, int | None]]:
    """Read the entries that `SavedTensors.tell` returns.

    Args:
        begin: time of the step's begin, on the clock of `time.perf_counter`.
        present: ids of the storages that autograd has not given up.

    Yields:
        Each event; its time and the bytes that were live then; and the size of the storage, where a storage was saved
        that autograd has given up since.
    """
    for event, storage, tick, nbytes, seconds, busy_seconds, live_bytes in entries:
        is_gone = event == SAVED and storage >= 0 and storage not in present
        moment = Moment(seconds - begin, busy_seconds, live_bytes, live_bytes)
        yield EVENTS[event](storage, tick), moment, nbytes if is_gone else None
