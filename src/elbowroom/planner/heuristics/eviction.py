"""A sweep over the events of a step that lets storages leave where room is needed, and return where there is room.

Between two events only ops run and nothing can move. So at each event the stretch up to the next one is made to fit,
by releasing what a strategy ranks highest; then what is away is fetched, in order of its next use, if from now until
that use its room stays free.

    events     e0         e1         e2         e3
    ticks       |(e0..e1] | (e1..e2] | (e2..e3] |
    at e1:  (e1..e2] over the budget?             release, until it is not
            room for what is away until its use?  reload

What is released at an event is gone from the tick after it; what is reloaded counts from its event on. So the bytes are
exact, and a sweep ends within the budget if anything that moves the same gaps can.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from itertools import pairwise

import numpy as np

from elbowroom.cost.transfers import reload_seconds
from elbowroom.ir.plan import Choice
from elbowroom.planner.schedule.draft import Draft, Drafter, Key, Option
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import Times, list_moments


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvictableGap:
    """A gap that may be spent away.

    Attributes:
        key: which gap.
        opens: the event from which on it may be released.
        closes: the event at which it must be back: the gap's need, or an earlier replay that reads it.
        returns: it is not fetched before this tick, but on demand.
    """

    key: Key
    opens: int
    closes: int
    returns: int = 0


Rank = Callable[[EvictableGap, int, bool], tuple[float, ...]]
"""(absence, tick, whether the tier below has its contents already) -> the highest leaves first. Ties: the lowest id."""


def list_evictable_gaps(drafter: Drafter) -> list[EvictableGap]:
    """Every gap, by key."""
    return [EvictableGap(key=key, opens=gap.opens, closes=gap.closes) for key, gap in sorted(drafter.gaps.items())]


def farthest_next_use(drafter: Drafter) -> Rank:
    """Belady's rule: what is used last leaves first. Before that, what may leave and return at no cost.

    At no cost is what the tier below has already, and what can return while the ops up to its use run.
    """
    begins, link, storages = drafter.begins, drafter.replay.costs.link, drafter.replay.trace.storages

    def rank(absence: EvictableGap, tick: int, is_clean: bool) -> tuple[float, ...]:
        seconds = reload_seconds(link, storages[absence.key[0]].nbytes)
        is_free = is_clean and begins[absence.closes] - begins[tick] >= seconds
        return (float(is_free), float(absence.closes))

    return rank


def draft_offloads(times: dict[Key, Times]) -> Draft:
    """The draft that moves these gaps at these times."""
    return {key: Option(Choice.OFFLOAD, release=each.release, back=each.back) for key, each in times.items()}


class EvictionSweep:
    """One sweep; `run` does it.

    Args:
        drafter: of the gaps.
        load: of the step in which none of the absences is taken; the sweep takes those that it needs.
        budget_bytes: to keep to, or to the least that the absences allow where that is more.
        absences: what may leave.
        rank: what leaves first.
    """

    def __init__(
        self, drafter: Drafter, load: MemoryCurve, budget_bytes: int, gap_arrays: Iterable[EvictableGap], rank: Rank
    ) -> None:
        self._drafter, self._load, self._rank = drafter, load, rank
        useful = [each for each in gap_arrays if load.gone[each.key] < each.closes]
        self._coming = sorted(useful, key=lambda each: (each.opens, each.key), reverse=True)
        self._budget = max(budget_bytes, self._find_lowest_peak(useful))
        self._here: dict[Key, EvictableGap] = {}
        self._away: list[tuple[int, Key, EvictableGap]] = []  # by next use
        self._releases: dict[Key, int] = {}
        self._copied: set[tuple[int, int]] = set()  # a copy lasts as long as its claim
        self._times: dict[Key, Times] = {}

    def _find_lowest_peak(self, gap_arrays: list[EvictableGap]) -> int:
        live = self._load.live.copy()
        for each in gap_arrays:
            live[self._load.away(each.key, each.opens, each.closes)] -= self._load.nbytes[each.key]
        return int(live.max(initial=0))

    def run(self) -> dict[Key, Times]:
        """When each gap that leaves is released and reloaded.

        Cost: for each event, linear in the ticks until the next use of what is away; for each release, linear in the
        absences.
        """
        ticks = list_moments(self._drafter.replay.trace)
        for tick, upto in pairwise([*ticks, len(self._load.live) - 1]):
            self._advance(tick)
            self._make_room(tick, upto)
            self._fetch(tick, self._drafter.begins[upto])
        for closes, key, _ in self._away:
            self._times[key] = Times(self._releases[key], closes)
        return self._times

    def _advance(self, tick: int) -> None:
        """What is needed now is back; what opens now may leave."""
        while self._away and self._away[0][0] <= tick:
            closes, key, _ = self._away.pop(0)
            self._times[key] = Times(self._releases[key], closes)
        while self._coming and self._coming[-1].opens <= tick:
            each = self._coming.pop()
            self._here[each.key] = each

    def _make_room(self, tick: int, upto: int) -> None:
        live, gone = self._load.live, self._load.gone
        while upto > tick:
            peak = tick + 1 + int(np.argmax(live[tick + 1 : upto + 1]))
            if live[peak] <= self._budget:
                return
            self._here = {key: each for key, each in self._here.items() if each.closes > tick}
            able = [each for key, each in self._here.items() if gone[key] <= peak < each.closes]
            self._release(max(able, key=lambda each: self._order(each, tick)), tick)

    def _order(self, absence: EvictableGap, tick: int) -> tuple[float, ...]:
        rank = self._rank(absence, tick, self._claim(absence) in self._copied)
        return (*rank, -absence.key[0], -absence.key[1])

    def _release(self, absence: EvictableGap, tick: int) -> None:
        key = absence.key
        self._load.take(key, tick, absence.closes)
        self._releases[key] = tick
        self._copied.add(self._claim(absence))
        del self._here[key]
        bisect.insort(self._away, (absence.closes, key, absence), key=lambda item: item[:2])

    def _claim(self, absence: EvictableGap) -> tuple[int, int]:
        storage = absence.key[0]
        return storage, self._drafter.graph.claim_at(storage, self._drafter.gaps[absence.key].closes)

    def _fetch(self, tick: int, until: float) -> None:
        """Reload, in order of use, what there is room for until its use; no more than the link can begin by then.

        What begins at one moment goes in order of id, so what is used first should not share its moment with many.
        """
        replay = self._drafter.replay
        now = self._drafter.begins[tick]
        for item in list(self._away):
            closes, key, absence = item
            if absence.returns > tick or self._releases[key] == tick or tick < self._load.gone[key]:
                continue
            if self._load.live[tick:closes].max() + self._load.nbytes[key] > self._budget:
                return
            self._load.put(key, tick - 1, closes)
            self._away.remove(item)
            self._times[key] = Times(self._releases[key], tick)
            now += reload_seconds(replay.costs.link, replay.trace.storages[key[0]].nbytes)
            if now >= until:
                return
