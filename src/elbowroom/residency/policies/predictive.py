"""Evicts by a prefetch plan made from the previous step; without one, as `delta`.

From the order and times of saves and needs, and the memory demand, `residency.prefetch_plan` decides which storages are
copied out behind the ops, when they are reloaded, and which are dropped. Under pressure, storages that have been copied
are evicted first, then those planned to be dropped, then by lowest score: min(recompute, swap) / (bytes x events until
the next use, or seconds since the last). The cost of a swap includes copies queued before it.

Source: vDNN, Capuchin and TENSILE plan by next uses within an iteration; the score is DELTA's, with the time to the
next use instead of idle time. L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM
Systems Journal 5, 1966: evict what is needed last.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from elbowroom.ir.actions import Offload, Reload
from elbowroom.ir.events import Event, PressureRaised, StorageSaved
from elbowroom.residency.access_history import AccessHistory, StepAccesses
from elbowroom.residency.context import PolicyContext, replay_seconds, spare_bytes
from elbowroom.residency.machine import Intent
from elbowroom.residency.online import Moment, Online
from elbowroom.residency.prefetch_plan import ForeseenMove, plan_prefetch

TRIES = 2
"""Prefetch plans made for steps of one shape, each from the previous step; then the best is kept."""

SHAPES = 16
"""Most step shapes that are remembered."""

LEARNT = 2
"""Steps in which the recompute cost of a storage is looked up."""

AT_ONCE = 16
"""Storages whose cost is looked up per event, once memory has been short."""

WATCHED = 4
"""Storages checked per event for whether the program still holds them."""


class _Tried:
    """Prefetch plans for steps of one shape, each with its outcome."""

    def __init__(self) -> None:
        self._made: list[tuple[tuple[int, float], Mapping[int, ForeseenMove]]] = []
        self._is_open = False
        self._source: StepAccesses | None = None

    def choose(
        self, before: StepAccesses, make: Callable[[], Mapping[int, ForeseenMove]]
    ) -> Mapping[int, ForeseenMove]:
        """Return a new plan, made from the previous step; the best plan, once `TRIES` have been made."""
        outcome = -len(before.seconds), before.end_seconds  # most events first: an aborted step is not a fast one
        if self._is_open:
            if before is self._source or not before.is_foreseen:
                return self._made[-1][1]  # no outcome yet: the step had no backward pass, or followed a plan
            self._made[-1] = outcome, self._made[-1][1]
        elif not self._made:
            self._made.append((outcome, {}))  # the outcome without any prefetch plan
        self._source = before
        self._is_open = len(self._made) <= TRIES
        if not self._is_open:
            return min(self._made, key=lambda each: each[0])[1]
        self._made.append(((0, math.inf), make()))
        return self._made[-1][1]


class Policy(Online):
    """Score: by prefetch plan; else min(recompute, swap) / (bytes x events to next use, or seconds since the last)."""

    is_early = True

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        super().__init__(context, history)
        self._roles: Mapping[int, ForeseenMove] | None = None
        self._tight = 0  # the last event with memory short, in the previous step
        self._missing: dict[int, int] = {}  # bytes of each evicted storage
        self._missing_bytes = 0
        self._unlearnt: deque[int] = deque()
        self._held: deque[int] = deque()  # storages that the program holds as well
        self._copied: dict[int, float] = {}  # when each copy out is complete
        self._out_free = 0.0
        self._backs: list[tuple[int, int]] = []  # heap of (event, storage) of planned reloads

    # -- events ---------------------------------------------------------------------------------------------------

    def decide(self, event: Event) -> Iterable[Intent]:
        """Return the intents to carry out after `event`."""
        if self._roles is None:
            self._foresee()
        if isinstance(event, PressureRaised):
            if not self.history.present.was_tight:
                self.history.present.was_tight = True
                self._unlearnt = deque(self._here)
            self._attend(self.look())
        return super().decide(event)

    def may_wait(self) -> bool:
        if self._roles is None:
            self._foresee()
        return not self._roles

    def watch(self, event: Event, moment: Moment | None = None, nbytes: int | None = None) -> None:
        super().watch(event, moment, nbytes)
        # Of an event that is told late, what `_copy_early` does at once.
        if moment is not None and isinstance(event, StorageSaved) and self.history.present.was_tight:
            self._unlearnt.append(event.storage)

    def comes(self, storage: int, moment: Moment) -> None:
        self._attend(moment)
        self.history.present.end_seconds = moment.seconds
        if self._missing:
            self.came(storage)
        if self._held:
            self._watch_held()

    def ended(self, storage: int) -> None:
        self._copied.pop(storage, None)
        if self._missing or self.history.present.was_tight:
            self.comes(storage, self.look())  # else the next event takes the peak into account
        super().ended(storage)

    def _attend(self, moment: Moment) -> None:
        if self._unlearnt:
            for _ in range(min(AT_ONCE, len(self._unlearnt))):
                each = self._unlearnt.popleft()
                if each in self._here:
                    self._learn(each)
        self.history.demand(moment.most_bytes + self._missing_bytes)

    def _foresee(self) -> None:
        history, budget_bytes = self.history, self.context.budget_bytes
        before = history.before
        history.present.is_foreseen = True
        tight = (event for event, nbytes in enumerate(before.demand_bytes) if nbytes > budget_bytes)
        self._tight = max(tight, default=0)
        key = before.find_shape(), budget_bytes
        self._roles = {}
        if not before.saves:
            return
        tried: dict[object, _Tried] = history.tried
        # Planning takes time, and is useless if steps do not recur: a new shape, unless the first, waits to recur.
        must_wait = bool(tried) and key not in tried
        chosen = tried.setdefault(key, _Tried())
        if len(tried) > SHAPES:
            del tried[next(iter(tried))]
        if not must_wait:
            self._roles = chosen.choose(before, lambda: plan_prefetch(before, budget_bytes, self.context.move_seconds))

    def missing_bytes(self) -> int:
        return self._missing_bytes

    def left(self, storage: int, is_dropped: bool) -> None:
        self._learn(storage)
        self._missing[storage] = nbytes = self.context.nbytes(storage)
        self._missing_bytes += nbytes
        if is_dropped:
            return
        role = self._find_role(storage)
        if storage not in self._copied:
            self._send(storage)
        if role is not None and role.is_copied and role.back > self.history.events:
            heapq.heappush(self._backs, (role.back, storage))

    def came(self, storage: int) -> None:
        self._missing_bytes -= self._missing.pop(storage, 0)

    def _send(self, storage: int) -> None:
        out, _ = self.context.move_seconds(self.context.nbytes(storage))
        self._copied[storage] = self._out_free = max(self._out_free, self.context.now()) + out

    def _watch_held(self) -> None:
        """Record since which event the program no longer holds a saved storage."""
        for _ in range(min(WATCHED, len(self._held))):
            storage = self._held.popleft()
            if storage not in self._here:
                continue
            if self.context.may_leave(storage):
                use = self.history.find(storage)
                if use is not None:
                    use.free = self.history.events
            else:
                self._held.append(storage)

    def _learn(self, storage: int) -> None:
        """Look up what recomputing a storage costs, in the first `LEARNT` steps, since ops are slow at first."""
        use = self.history.find(storage)
        if use is None or use.learnt:
            return
        before = self.history.find_before(storage)
        if before is None or not before.learnt:
            if self.context.may_leave(storage):
                use.free = use.events[-1]
            else:
                self._held.append(storage)
        else:
            use.free, use.learnt = before.free, before.learnt
            if use.learnt >= LEARNT:
                use.own_seconds = before.own_seconds
                use.own_bytes = before.own_bytes
                use.leaves = before.leaves
                return
        use.learnt += 1
        path = self.context.find_path(storage)
        if path is None:
            use.own_seconds = math.inf
        else:
            use.own_seconds, use.own_bytes = path.seconds, path.nbytes
            leaves = [self.history.find(leaf.id) for leaf in path.leaves]
            use.leaves = tuple(leaf.place for leaf in leaves if leaf is not None)

    def _find_role(self, storage: int) -> ForeseenMove | None:
        if not self._roles:
            return None
        use = self.history.find_before(storage)
        return None if use is None else self._roles.get(use.place)

    # -- scores ---------------------------------------------------------------------------------------------------

    def rate(self, storage: int) -> float:
        return self.score(storage)[1]

    def score(self, storage: int) -> tuple[int, float]:
        context, history = self.context, self.history
        before = history.find_before(storage)
        role = None if before is None or not self._roles else self._roles.get(before.place)
        rank = self._find_rank(storage, role)
        events = None if before is None else history.count_until_need(before)
        absent = self.idle_seconds(storage) if events is None else min(events, max(1, self._tight - history.events))
        nbytes = context.nbytes(storage)
        weight = nbytes * absent
        if weight <= 0:
            return rank, math.inf
        if rank == 0:
            return rank, -float(events or 1)
        if rank == 1:
            return rank, replay_seconds(context, storage) / weight
        swap = self._swap_seconds(storage, nbytes, role)
        # If a copy has begun, it will be a swap.
        seconds = swap if storage in self._copied else min(swap, replay_seconds(context, storage, swap))
        return rank, seconds / weight

    def _find_rank(self, storage: int, role: ForeseenMove | None) -> int:
        if role is None or role.back < self.history.events:
            return 2
        if not role.is_copied:
            return 1
        return 0 if self._copied.get(storage, math.inf) <= self.context.now() else 2

    def drops(self, storage: int) -> bool:
        role = self._find_role(storage)
        if storage in self._copied:
            return False  # a copy is out or under way
        if role is not None and role.back >= self.history.events and not role.is_copied:
            return True
        swap = self._swap_seconds(storage, self.context.nbytes(storage), role)
        return replay_seconds(self.context, storage, swap) < swap

    def _swap_seconds(self, storage: int, nbytes: int, role: ForeseenMove | None) -> float:
        """Return the seconds of a swap, with the copies queued before it; without the reload, if that is planned."""
        context = self.context
        out, back = context.move_seconds(nbytes)
        if role is not None and role.is_copied and role.back > self.history.events:
            back = 0.0
        if storage in self._copied:
            return back + max(0.0, self._copied[storage] - context.now())
        return back + out + max(0.0, self._out_free - context.now())

    # -- early copies and reloads ---------------------------------------------------------------------------------

    def list_next(self, away: Iterable[int]) -> Iterable[int]:
        found = [(events, storage) for storage in away if (events := self.history.next_use(storage)) is not None]
        return [storage for _, storage in sorted(found)] or away

    def _come_early(self) -> list[Intent]:
        if not self._roles:
            return super()._come_early()
        intents: list[Intent] = []
        spare = spare_bytes(self.context)
        while self._backs and self._backs[0][0] <= self.history.events:
            storage = self._backs[0][1]
            if storage in self._away:
                spare -= self.context.nbytes(storage)
                if spare < 0:
                    break
                intents.append(Reload(storage))
                self._expect(storage)
            heapq.heappop(self._backs)
        return intents

    def _copy_early(self, saved: int) -> list[Intent]:
        if self.history.present.was_tight or self.history.before.was_tight:
            self._learn(saved)
        if not self._roles:
            intents = super()._copy_early(saved)
            for intent in intents:
                if intent.storage not in self._copied:
                    self._send(intent.storage)
            return intents
        role = self._find_role(saved)
        if role is None or not role.is_copied or saved in self._copied:
            return []
        self._send(saved)
        return [Offload(saved)]
