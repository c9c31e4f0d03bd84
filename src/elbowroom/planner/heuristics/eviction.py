"""A sweep over the events of a step that evicts storages when memory runs short and reloads them when it suffices.

Nothing can move between two events. So at each event, the sweep makes the interval up to the next event fit, by
releasing the storages that a strategy ranks highest. Then it reloads evicted storages in order of their next use, if
memory suffices from now until that use.

    events     e0         e1         e2         e3
    ticks       |(e0..e1] | (e1..e2] | (e2..e3] |
    at e1:  (e1..e2] over the budget?                     release until it fits
            memory for an evicted storage until its use?  reload it

A storage released at an event is gone from the next tick on; a reloaded one counts from its event on. So the bytes are
exact, and a sweep stays within the budget if any plan that moves the same gaps can.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from elbowroom.cost.transfers import reload_seconds
from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.schedule.draft import Draft, Drafter, Key, Option
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import Times, list_moments

if TYPE_CHECKING:
    from elbowroom.planner.problem import Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvictableGap:
    """A gap in which a storage may be away.

    Attributes:
        key: the gap's key.
        opens: the first event at which it may be released.
        closes: the event at which it must be back: the gap's need, or an earlier replay that reads it.
        returns: before this tick it is reloaded on demand only.
    """

    key: Key
    opens: int
    closes: int
    returns: int = 0


Rank = Callable[[EvictableGap, int, bool], tuple[float, ...]]
"""(gap, tick, whether a host copy exists) -> rank; the highest is evicted first. Ties: the lowest id."""


def list_evictable_gaps(drafter: Drafter) -> list[EvictableGap]:
    """Return every gap, sorted by key."""
    return [EvictableGap(key=key, opens=gap.opens, closes=gap.closes) for key, gap in sorted(drafter.gaps.items())]


def farthest_next_use(drafter: Drafter) -> Rank:
    """Rank by Belady's rule, the farthest next use first; before that, storages that can be evicted at no cost.

    Eviction costs nothing if a host copy exists and the reload ends while the ops before the next use run.
    """
    begins = drafter.begins
    link = drafter.replay.costs.link
    storages = drafter.replay.trace.storages

    def rank(gap: EvictableGap, tick: int, is_clean: bool) -> tuple[float, ...]:
        seconds = reload_seconds(link, storages[gap.key[0]].nbytes)
        is_free = is_clean and begins[gap.closes] - begins[tick] >= seconds
        return (float(is_free), float(gap.closes))

    return rank


def draft_offloads(times: dict[Key, Times]) -> Draft:
    """Return the draft that moves these gaps at these times."""
    return {key: Option(Choice.OFFLOAD, release=each.release, back=each.back) for key, each in times.items()}


def sweep_offloads(problem: Problem, strategy: str) -> Plan:
    """Return the plan of one sweep by Belady's rule; it fits wherever offloading can."""
    drafter = problem.drafter
    load = MemoryCurve(drafter, problem.plain.live_bytes)
    sweep = EvictionSweep(drafter, load, problem.budget_bytes, list_evictable_gaps(drafter), farthest_next_use(drafter))
    plan = drafter.finish(draft_offloads(sweep.run()), strategy, problem.budget_bytes)
    assert plan is not None  # it drops nothing
    return plan


class EvictionSweep:
    """One sweep; `run` does it.

    Args:
        drafter: of the gaps.
        load: memory use without any eviction; the sweep subtracts its evictions.
        budget_bytes: limit; if these gaps cannot reach it, their lowest peak is the limit.
        gaps: what may be evicted.
        rank: which storage is evicted first.
    """

    def __init__(
        self, drafter: Drafter, load: MemoryCurve, budget_bytes: int, gaps: Iterable[EvictableGap], rank: Rank
    ) -> None:
        self._drafter = drafter
        self._load = load
        self._rank = rank
        useful = [each for each in gaps if load.gone[each.key] < each.closes]
        self._coming = sorted(useful, key=lambda each: (each.opens, each.key), reverse=True)
        self._budget = max(budget_bytes, self._find_lowest_peak(useful))
        self._present: dict[Key, EvictableGap] = {}
        self._away: list[tuple[int, Key, EvictableGap]] = []  # sorted by next use
        self._releases: dict[Key, int] = {}
        self._copied: set[tuple[int, int]] = set()  # a copy lasts as long as its claim
        self._times: dict[Key, Times] = {}

    def _find_lowest_peak(self, gaps: list[EvictableGap]) -> int:
        live = self._load.live.copy()
        for each in gaps:
            live[self._load.away(each.key, each.opens, each.closes)] -= self._load.nbytes[each.key]
        return int(live.max(initial=0))

    def run(self) -> dict[Key, Times]:
        """Return the release and reload of each gap that is evicted.

        Cost: for each event, linear in the ticks until the next use of evicted storages; for each release, linear in
        the gaps.
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
        """Mark storages needed at a tick as returned, and gaps that open at it as evictable."""
        while self._away and self._away[0][0] <= tick:
            closes, key, _ = self._away.pop(0)
            self._times[key] = Times(self._releases[key], closes)
        while self._coming and self._coming[-1].opens <= tick:
            each = self._coming.pop()
            self._present[each.key] = each

    def _make_room(self, tick: int, upto: int) -> None:
        live, gone = self._load.live, self._load.gone
        while upto > tick:
            peak = tick + 1 + int(np.argmax(live[tick + 1 : upto + 1]))
            if live[peak] <= self._budget:
                return
            self._present = {key: each for key, each in self._present.items() if each.closes > tick}
            able = [each for key, each in self._present.items() if gone[key] <= peak < each.closes]
            self._release(max(able, key=lambda each: self._order(each, tick)), tick)

    def _order(self, gap: EvictableGap, tick: int) -> tuple[float, ...]:
        rank = self._rank(gap, tick, self._claim(gap) in self._copied)
        return (*rank, -gap.key[0], -gap.key[1])

    def _release(self, gap: EvictableGap, tick: int) -> None:
        key = gap.key
        self._load.take(key, tick, gap.closes)
        self._releases[key] = tick
        self._copied.add(self._claim(gap))
        del self._present[key]
        bisect.insort(self._away, (gap.closes, key, gap), key=lambda item: item[:2])

    def _claim(self, gap: EvictableGap) -> tuple[int, int]:
        storage = gap.key[0]
        return storage, self._drafter.graph.claim_at(storage, self._drafter.gaps[gap.key].closes)

    def _fetch(self, tick: int, until: float) -> None:
        """Reload storages, in order of use, if memory suffices until their use and the link can begin by `until`.

        Reloads of one moment run in order of storage id, so few of them should share the moment of the first use.
        """
        replay = self._drafter.replay
        now = self._drafter.begins[tick]
        for item in list(self._away):
            closes, key, gap = item
            if gap.returns > tick or self._releases[key] == tick or tick < self._load.gone[key]:
                continue
            if self._load.live[tick:closes].max() + self._load.nbytes[key] > self._budget:
                return
            self._load.put(key, tick - 1, closes)
            self._away.remove(item)
            self._times[key] = Times(self._releases[key], tick)
            now += reload_seconds(replay.costs.link, replay.trace.storages[key[0]].nbytes)
            if now >= until:
                return
