"""Deciding as the step goes on: when room is needed, what is cheapest to miss leaves, in the cheaper manner.

    PressureRaised    rate a sample of what is there, let the lowest go, until there is room
    StorageSaved      where little room is left, begin to copy what will have to go next
    StorageNeeded     where there is room, bring back early what was offloaded

What is asked of a driver is in `context.PolicyContext`; three small methods tell one policy from another.

Source: sampling what is to be rated: M. Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, appendix; here
with a fixed sample, so that a decision costs the same however many storages there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from elbowroom.ir.actions import Offload, Release, Reload
from elbowroom.ir.events import Event, PressureRaised, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.candidates import Candidates
from elbowroom.residency.context import PolicyContext, replay_seconds, spare_bytes, swap_seconds
from elbowroom.residency.machine import Drop, Intent

SAMPLE = 128
"""Storages rated for each that leaves; of no more, all are."""

PREFETCHED = 5
"""Reloads begun at a need, at most."""

AHEAD = 0.1
"""Of the budget: where less of it is free, copies are begun before there is need."""


class Moment(NamedTuple):
    """What there was when something happened.

    Attributes:
        seconds: since the step began.
        busy_seconds: of those, without what moves, replays and decisions took.
        live_bytes: there was so much.
        most_bytes: most that there was, or was asked for, since the moment before.
    """

    seconds: float
    busy_seconds: float
    live_bytes: int
    most_bytes: int


class Online:
    """A policy that decides under pressure. A member of the family says how to rate, and which manner to prefer.

    Args:
        context: what the driver knows.
        history: what earlier steps taught; this one is added to it.

    Attributes:
        is_early: whether copies begin before room is needed.
        uses_addresses: whether it asks where storages are; a driver that would have to find out need not, otherwise.
    """

    is_early = False
    uses_addresses = False

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        self.context, self.history = context, history
        history.begin()
        self._here = Candidates()  # on the device, and may move
        self._away: dict[int, None] = {}  # offloaded, in order
        self._accessed: dict[int, float] = {}

    def idle_seconds(self, storage: int) -> float:
        """Since autograd last saved it or asked for it, or a replay did."""
        return self.context.now() - self._accessed[storage]

    # -- what a member says ---------------------------------------------------------------------------------------

    def rate(self, storage: int) -> float:
        """The lower, the sooner it leaves."""
        raise NotImplementedError

    def rank(self, storage: int) -> int:
        """What is of a lower rank leaves first, however it is rated."""
        return 0

    def drops(self, storage: int) -> bool:
        """Whether it is dropped and not offloaded; asked only where both can be done."""
        return replay_seconds(self.context, storage) < swap_seconds(self.context, storage)

    def list_next(self, away: Iterable[int]) -> Iterable[int]:
        """Of what was offloaded (the earliest first), what is to come back early, in order; nothing by default."""
        return ()

    def may_wait(self) -> bool:
        """Whether nothing will be asked for while more than `AHEAD` of the budget is free: it may be told later, then.

        Asked when the step begins.
        """
        return True

    def missing_bytes(self) -> int:
        """What there would be beside what there is, had nothing left; 0 of a member that does not count."""
        return 0

    def left(self, storage: int, is_dropped: bool) -> None:
        """Told that a storage leaves."""

    def came(self, storage: int) -> None:
        """Told that a storage is there again."""

    def comes(self, storage: int, moment: Moment) -> None:
        """Told that a storage was saved, is needed or has returned, before anything is made of it."""

    def ended(self, storage: int) -> None:
        """Told that nobody can ask for a storage again."""
        self._take(storage)
        self._away.pop(storage, None)
        self._accessed.pop(storage, None)
        self.history.freed(storage)

    # -- the machine's side ---------------------------------------------------------------------------------------

    def decide(self, event: Event) -> Iterable[Intent]:
        """What to do once `event` has been served."""
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
        """Learn of a save, a need, a return or an end, whoever decides what follows from it.

        Args:
            moment: when it happened; now if None.
            nbytes: of what was saved, if it might have left then and the driver knows nothing of it any more.
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
            nbytes = context.nbytes(storage)
        level_bytes = moment.live_bytes + self.missing_bytes()
        if isinstance(event, StorageNeeded):
            history.needed(storage, moment.busy_seconds, level_bytes)
        elif isinstance(event, StorageSaved):
            history.saved(storage, nbytes, moment.busy_seconds, level_bytes)

    def look(self) -> Moment:
        """The present moment."""
        context = self.context
        return Moment(context.now(), context.busy_seconds(), context.live_bytes(), context.take_recent_peak())

    def learn(self, intent: Intent) -> None:
        """Somebody else has decided this."""
        storage = intent.storage
        if isinstance(intent, Reload):
            if storage in self._away and self._add(storage):
                self.came(storage)
        elif not isinstance(intent, Offload) and storage in self._here:
            self._take(storage)
            if isinstance(intent, Release):
                self._away[storage] = None
            self.left(storage, isinstance(intent, Drop))

    def _add(self, storage: int) -> bool:
        """Put a storage among those on the device; whether it was not there before."""
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
        copies: list[Intent] = []
        releases: list[Intent] = []
        while nbytes > 0 and (storage := self._pick()) is not None:
            self._take(storage)
            nbytes -= self.context.nbytes(storage)
            swap, replay = swap_seconds(self.context, storage), replay_seconds(self.context, storage)
            is_dropped = replay < math.inf and (swap == math.inf or self.drops(storage))
            self.left(storage, is_dropped)
            if is_dropped:
                releases.append(Drop(storage, self.context.add_segment(storage)))
                continue
            self._away[storage] = None
            copies.append(Offload(storage))
            releases.append(Release(storage))
        return copies + releases  # so that all copies are under way before the first is waited for

    def _pick(self) -> int | None:
        """The lowest of a sample; None if nothing may leave."""
        for among in (self._here.draw(SAMPLE), self._here):
            rated = [
                (self.rank(storage), self.rate(storage), storage)
                for storage in among
                if self.context.may_leave(storage)
            ]
            if rated:
                return min(rated)[2]
            if len(self._here) <= SAMPLE:
                break
        return None

    def _come_early(self) -> list[Intent]:
        spare = spare_bytes(self.context) - int(AHEAD * self.context.budget_bytes)
        intents: list[Intent] = []
        if spare <= 0:
            return intents
        for storage in self.list_next(self._away):
            spare -= self.context.nbytes(storage)
            if spare < 0 or len(intents) == PREFETCHED:
                break
            intents.append(Reload(storage))
        for intent in intents:
            self._expect(intent.storage)
        return intents

    def _expect(self, storage: int) -> None:
        """It is on its way back, and on the device from here on, as far as room goes."""
        self._away.pop(storage)
        self._put(storage)
        self.came(storage)

    def _copy_early(self, saved: int) -> list[Intent]:
        if spare_bytes(self.context) > AHEAD * self.context.budget_bytes:
            return []
        storage = self._pick()
        if storage is None or (replay_seconds(self.context, storage) < math.inf and self.drops(storage)):
            return []
        return [Offload(storage)]
