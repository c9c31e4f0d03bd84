"""What autograd has done while nobody had to decide anything, and what it was given to keep."""

from __future__ import annotations

import time
import weakref
from collections.abc import Container, Iterator
from typing import Any

from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.online import Moment
from elbowroom.runtime.account import Account
from elbowroom.runtime.facts import Clock
from elbowroom.runtime.residence import Guest

NO_STORAGE = -1
"""Of a tensor that is no plain block of bytes, or is there whatever happens: nothing moves it, but what is planned for
its tick happens then."""

Passing = StorageSaved | StorageNeeded | StorageFreed
"""What autograd does."""


class Past:
    """Puts events down, to be told later in order.

    Args:
        begin: when the step began, on the clock of `time.perf_counter`.
        clock: times the step's own ops.
        account: counts what is there.

    Attributes:
        guests: what autograd was given, and has not given up.
    """

    def __init__(self, begin: float, clock: Clock, account: Account) -> None:
        self._begin, self._clock, self._account = begin, clock, account
        self.guests: list[weakref.ref[Guest]] = []
        self._events: list[Any] = []  # flat: an object for each would make the garbage collector slow

    def add(self, event: type[Passing], storage: int, tick: int, nbytes: int = 0) -> None:
        """Something happens. `nbytes`: of what is saved."""
        self._events += (
            event, storage, tick, nbytes, time.perf_counter(), self._clock.busy_seconds, self._account.live_bytes,
        )  # fmt: skip

    def tell(self, present: Container[int]) -> Iterator[tuple[Passing, Moment, int | None]]:
        """Each event, when it was, and the bytes of a storage that was saved and is not `present` any more."""
        events = iter(self._events)
        for event, storage, tick, nbytes, seconds, busy_seconds, live_bytes in zip(*[events] * 7, strict=True):
            is_gone = event is StorageSaved and storage >= 0 and storage not in present
            moment = Moment(seconds - self._begin, busy_seconds, live_bytes, live_bytes)
            yield event(storage, tick), moment, nbytes if is_gone else None

    def list_guests(self) -> list[Guest]:
        """Those that are there."""
        return [guest for guest in (find() for find in self.guests) if guest is not None]
