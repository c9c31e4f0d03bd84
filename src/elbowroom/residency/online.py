"""Online eviction: under memory pressure, evict the storages with the lowest scores, by offloading or dropping.

    PressureRaised    score a sample of the storages on the device, evict the lowest, until enough bytes are free
    StorageSaved      if little memory is free, begin to copy out the next victim
    StorageNeeded     if memory is free, reload offloaded storages early

`context.PolicyContext` lists the queries to a driver. Policies differ in `rate`, `score`, `drops` and `list_next`.

Source: scoring a sample: M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, appendix; here the sample
size is fixed, so that the cost of a decision does not depend on the number of storages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import Event, PressureRaised, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.access_history import NEVER, AccessHistory
from elbowroom.residency.candidates import Candidates
from elbowroom.residency.context import PolicyContext, replay_seconds, spare_bytes, swap_seconds
from elbowroom.residency.machine import Drop, Intent

SAMPLE = 64
"""Storages scored at once; all of them if there are no more."""

EARLY = 16
"""The same for a copy that begins early: another storage may turn out to leave first."""

EVICTED = 4
"""Storages evicted from one sample."""

SKIPPED = 7
"""Events after one that began no copy early, because the next victim will be dropped, until the next that may."""

PREFETCHED = 5
"""Most reloads begun at one need."""

AHEAD = 0.1
"""Fraction of the budget: with less of it free, copies begin before memory is needed."""


class Moment(NamedTuple):
    """The time and memory use at an event.

    Attributes:
        seconds: since the step began.
        busy_seconds: of these, seconds that the step's own ops took, without moves, replays and decisions.
        live_bytes: bytes on the device.
        most_bytes: peak of bytes on the device, or requested, since the previous moment.
    """

    seconds: float
    busy_seconds: float
    live_bytes: int
    most_bytes: int


class Online:
    """Base of the policies that evict under pressure. Subclasses define the score, and when to drop or to offload.

    Args:
        context: queries to the driver.
        history: accesses of earlier steps; this step is added to it.

    Attributes:
        is_early: whether copies begin before memory is needed.
        uses_addresses: whether the policy queries addresses, which are costly for some drivers.
    """

    is_early = False
    uses_addresses = False

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        self.context, self.history = context, history
        history.begin()
        self._here = Candidates()  # on the device, and may move
        self._away: dict[int, None] = {}  # offloaded, in order
        self._accessed: dict[int, float] = {}
        self._copied_early = -1  # the last such storage
        self._skipped_until = 0  # no copy begins early before this event
        self._next_bytes = 0  # of the storage that comes back next, if there was no room; or `NEVER`

    def idle_seconds(self, storage: int) -> float:
        """Return the seconds since autograd last saved or needed a storage, or a replay restored it."""
        return self.context.now() - self._accessed[storage]

    # -- for subclasses to override -------------------------------------------------------------------------------

    def rate(self, storage: int) -> float:
        """Return the rating of a storage; the lowest is evicted first."""
        raise NotImplementedError

    def score(self, storage: int) -> tuple[int, float]:
        """Return the rank and the rating of a storage; lower ranks are evicted first, whatever their ratings."""
        return 0, self.rate(storage)

    def drops(self, storage: int) -> bool:
        """Tell whether to drop a storage rather than offload it; called only where both are possible."""
        return replay_seconds(self.context, storage) < swap_seconds(self.context, storage)

    def list_next(self, away: Iterable[int]) -> Iterable[int]:
        """Return the offloaded storages to reload early, in order. `away` is in order of offloading; default: none."""
        return ()

    def may_wait(self) -> bool:
        """Tell whether the driver may pass events later: all before it raises pressure, before a storage is needed that
        has left, and at the events that `find_marks` tells.
        """
        return True

    def find_marks(self) -> tuple[int, int]:
        """Return at how many live bytes the policy may decide something without pressure.

        Returns:
            At most so many at a need of a storage on the device, and at least so many at a save.
        """
        limit_bytes = self.context.budget_bytes - int(AHEAD * self.context.budget_bytes)
        is_copying = self._copied_early in self._here or self.history.events < self._skipped_until
        low_bytes = limit_bytes - max(1, self._next_bytes) if self._away else -1
        return low_bytes, limit_bytes if self.is_early and not is_copying else NEVER

    def missing_bytes(self) -> int:
        """Return the bytes of evicted storages; 0 for policies that do not count them."""
        return 0

    def left(self, storage: int, is_dropped: bool) -> None:
        """Handle the eviction of a storage."""

    def came(self, storage: int) -> None:
        """Handle the return of a storage."""

    def comes(self, storage: int, moment: Moment) -> None:
        """Handle a save, need or return of a storage, before it is recorded."""

    def ended(self, storage: int) -> None:
        """Handle the end of a storage: it cannot be needed again."""
        self._take(storage)
        self._away.pop(storage, None)
        self._accessed.pop(storage, None)
        self.history.freed(storage)

    # -- called by the machine and the drivers --------------------------------------------------------------------

    def decide(self, event: Event) -> Iterable[Intent]:
        """Return the intents to carry out after `event`."""
        if isinstance(event, PressureRaised):
            self.history.was_short = True
            return self._relieve(event.nbytes)
        self.watch(event)
        if self._away and isinstance(event, StorageNeeded):
            return self._come_early()
        if self.is_early and event.storage in self._here and isinstance(event, StorageSaved):
            return self._copy_early(event.storage)
        return ()

    def watch(self, event: Event, moment: Moment | None = None, nbytes: int | None = None) -> None:
        """Record a save, need, return or end, without deciding anything.

        Args:
            moment: time and memory use at the event; now if None.
            nbytes: bytes of the saved storage, if it could have been evicted then and the driver no longer knows it.
        """
        storage = event.storage
        if isinstance(event, PressureRaised):
            return
        if isinstance(event, StorageFreed):
            self.ended(storage)
            return
        if moment is None:
            moment = self.look()
        self.comes(storage, moment)
        context, history = self.context, self.history
        may_move = context.may_move(storage)
        if may_move:
            self._accessed[storage] = moment.seconds
            if self._add(storage) and not isinstance(event, StorageSaved):
                self.came(storage)
        level_bytes = moment.live_bytes + self.missing_bytes()
        if isinstance(event, StorageNeeded):
            history.needed(storage, moment.busy_seconds, level_bytes)
        elif isinstance(event, StorageSaved):
            nbytes = context.nbytes(storage) if may_move else nbytes
            history.saved(storage, nbytes, moment.busy_seconds, level_bytes)

    def look(self) -> Moment:
        """Return the current moment."""
        context = self.context
        return Moment(context.now(), context.busy_seconds(), context.live_bytes(), context.take_recent_peak())

    def learn(self, intent: Intent) -> None:
        """Record a move that another policy has decided."""
        storage = intent.storage
        if isinstance(intent, Reload):
            if storage in self._away and self._add(storage):
                self.came(storage)
        elif not isinstance(intent, Offload) and storage in self._here:
            self._take(storage)
            if isinstance(intent, Release):
                self._away[storage] = None
                self._next_bytes = 0
            self.left(storage, isinstance(intent, Drop))

    def _add(self, storage: int) -> bool:
        """Add a storage to those on the device; return whether it is new there."""
        if storage in self._here:
            return False
        self._put(storage)
        self._away.pop(storage, None)
        return True

    def _put(self, storage: int) -> None:
        self._here.add(storage)

    def _take(self, storage: int) -> None:
        self._here.discard(storage)

    def _relieve(self, nbytes: int) -> list[Intent]:
        self._next_bytes = 0
        copies: list[Intent] = []
        releases: list[Intent] = []
        for storage in self._iterate_victims() if nbytes > 0 else ():
            self._take(storage)
            nbytes -= self.context.nbytes(storage)
            swap, replay = swap_seconds(self.context, storage), replay_seconds(self.context, storage)
            is_dropped = replay < math.inf and (swap == math.inf or self.drops(storage))
            self.left(storage, is_dropped)
            if is_dropped:
                releases.append(Drop(storage, self.context.add_segment(storage)))
            else:
                self._away[storage] = None
                copies.append(Offload(storage))
                releases.append(Release(storage))
            if nbytes <= 0:
                break
        return copies + releases  # start all copies before waiting for the first

    def _iterate_victims(self, sample: int = SAMPLE) -> Iterator[int]:
        """Yield the storages to evict, those with the lowest ranks and scores of a sample first."""
        is_found = True
        while is_found and len(self._here) > sample:
            rated = self._rate_all(self._here.draw(sample))
            for _ in range(EVICTED):
                storage = self._pop(rated)
                is_found = storage is not None
                if storage is not None:
                    yield storage
        rated = self._rate_all(self._here)
        while (storage := self._pop(rated)) is not None:
            yield storage

    def _rate_all(self, storages: Iterable[int]) -> list[tuple[int, float, int]]:
        rated = [(*self.score(storage), storage) for storage in dict.fromkeys(storages)]
        heapq.heapify(rated)
        return rated

    def _pop(self, rated: list[tuple[int, float, int]]) -> int | None:
        """Take the storage with the lowest rank and score that may leave; None if none may.

        The lowest ones are scored again, since the eviction of others may have made it more costly to restore them.
        """
        again = set[int]()
        while rated:
            storage = heapq.heappop(rated)[2]
            if storage in again:
                return storage
            if storage not in self._here or not self.context.may_leave(storage):
                continue
            again.add(storage)
            heapq.heappush(rated, (*self.score(storage), storage))
        return None

    def _come_early(self) -> list[Intent]:
        spare = spare_bytes(self.context) - int(AHEAD * self.context.budget_bytes)
        intents: list[Intent] = []
        if spare <= 0:
            return intents
        self._next_bytes = NEVER
        for storage in self.list_next(self._away):
            spare -= self.context.nbytes(storage)
            if spare < 0 or len(intents) == PREFETCHED:
                self._next_bytes = self.context.nbytes(storage)
                break
            intents.append(Reload(storage))
        for intent in intents:
            self._expect(intent.storage)
        return intents

    def _expect(self, storage: int) -> None:
        """Count a storage that is being reloaded as on the device."""
        self._away.pop(storage)
        self._put(storage)
        self.came(storage)

    def _copy_early(self, saved: int) -> list[Intent]:
        if self._copied_early in self._here or spare_bytes(self.context) > AHEAD * self.context.budget_bytes:
            return []
        if self.history.events < self._skipped_until:
            return []
        storage = next(self._iterate_victims(EARLY), None)
        if storage is None or (replay_seconds(self.context, storage) < math.inf and self.drops(storage)):
            self._skipped_until = self.history.events + SKIPPED
            return []
        self._copied_early = storage
        return [Offload(storage)]
