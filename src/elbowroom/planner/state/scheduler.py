"""Chooses which storages of the model's state leave, and when, so that memory use stays under a limit.

1. Where memory use exceeds the limit, gaps are taken one after the other: each time the one with the least transfer
   time for the excess that its absence removes, weighted with the time that the excess lasts. Transfer time counts
   several times as far as the link has no time for it, beside the copies chosen so far, before the excess begins and
   after it has ended.
2. Gaps that turn out not to be necessary are given back, the last first.
3. Every chosen gap is shortened as far as memory allows: released when the link is forecast to have copied it, and
   reloaded as late as the link allows, on the time axis of the plain step that follows itself.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from elbowroom.ir.plan import Choice, Decision
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.state.cyclic_link import NO_TRAFFIC, CyclicLink, Traffic
from elbowroom.planner.state.windows import Curve, Cycle, Window, list_windows
from elbowroom.simulator.planned import PreparedTrace

EXPOSED = 4.0
"""Usual weight of transfer time that nothing hides, relative to hidden transfer time."""

NEARLY = 1.02
"""A gap is taken if its rate has risen by no more than this since it was computed."""

PREFERENCE = 0.9
"""Share of its cost by which a preferred gap is cheaper."""

Pins = Mapping[int, Collection[int]]
"""Ticks at which replays read a storage of the state, by storage id."""


class StateScheduler:
    """Schedules moves of the state of one trace on one machine.

    Args:
        min_bytes: smaller storages stay.
        most_bytes: copies of the state may take so many bytes in the tiers below; None for any number.
    """

    def __init__(self, replay: PreparedTrace, min_bytes: int, most_bytes: int | None = None) -> None:
        self._replay = replay
        self._trace = replay.trace
        self._min_bytes = min_bytes
        self._most_bytes = most_bytes
        self._cycle = Cycle(replay)
        self._written = {
            storage: frozenset(write.tick for write in self._trace.writes[storage]) for storage in self._trace.state
        }

    def schedule(
        self,
        excess: Curve,
        pins: Pins | None = None,
        *,
        exposed: float = EXPOSED,
        preferred: Mapping[Key, float] | None = None,
        traffic: Traffic = NO_TRAFFIC,
    ) -> tuple[Decision, ...]:
        """Return moves after which no excess is left, or as little as possible.

        Args:
            excess: bytes by which memory use exceeds the limit at each tick if all state stays; negative where room is.
            pins: storages that replays read.
            exposed: weight of transfer time that nothing hides.
            preferred: how far each gap should be chosen, from 0 to 1; by default all alike.
            traffic: copies of activations, which take their part of the link.

        Cost: linear in the ticks of all gaps.
        """
        excess = np.array(excess)
        windows = list_windows(self._replay, self._cycle, self._min_bytes, pins or {})
        chosen = self._choose(excess, {each.key: each for each in windows}, exposed, preferred or {}, traffic)
        return self._set_ticks(excess, chosen, traffic)

    def move_all(self) -> tuple[Decision, ...]:
        """Return the moves with which every storage is away whenever no op uses it: the lowest memory use there is."""
        windows = list_windows(self._replay, self._cycle, self._min_bytes, {})
        windows.sort(key=lambda each: (-each.nbytes, each.key))
        below = _Below(self._most_bytes)
        return self.decide([(each, each.first, each.last) for each in windows if below.take(each)])

    # -- choice ---------------------------------------------------------------------------------------------------

    def _choose(
        self,
        excess: Curve,
        windows: Mapping[Key, Window],
        exposed: float,
        preferred: Mapping[Key, float],
        traffic: Traffic,
    ) -> list[Window]:
        """Choose gaps; their bytes are subtracted from the excess."""
        picked: dict[Key, Window] = {}
        below, link = _Below(self._most_bytes), self._make_link(traffic)

        def rate_window(window: Window) -> float:
            return self._rate(excess, picked, link, exposed, window) * (1 - PREFERENCE * preferred.get(window.key, 0.0))

        heap = [(rate_window(each), each.key) for each in windows.values()]
        heap = [each for each in heap if each[0] < np.inf]
        heapq.heapify(heap)
        while heap and excess.max(initial=0) > 0:
            before, key = heapq.heappop(heap)
            rate = rate_window(windows[key])
            if rate > before * NEARLY and rate < np.inf:
                heapq.heappush(heap, (rate, key))
                continue
            if rate == np.inf or not below.take(windows[key]):
                continue
            link.take(windows[key], is_dirty=self.is_dirty(key, picked))
            picked[key] = windows[key]
            self._take(excess, windows[key], -1)
        for key in reversed(list(picked)):
            window = picked[key]
            if self._cycle.view(excess, window.first + 1, window.until).max() + window.nbytes <= 0:
                del picked[key]
                self._take(excess, window, 1)
        return list(picked.values())

    def _make_link(self, traffic: Traffic) -> CyclicLink:
        out = LinkTimetable()
        return CyclicLink(self._cycle, out, out if self._replay.costs.link.half_duplex else LinkTimetable(), traffic)

    def _rate(self, excess: Curve, picked: Collection[Key], link: CyclicLink, exposed: float, window: Window) -> float:
        """Return transfer seconds for each byte-second of excess that a gap removes; infinite if it removes none."""
        begin, stop = window.first + 1, window.until
        over = self._cycle.view(excess, begin, stop).clip(0, window.nbytes)
        found = np.flatnonzero(over)
        if not len(found):
            return np.inf
        gain = float(over @ self._cycle.view(self._cycle.weights, begin, stop))
        is_dirty = self.is_dirty(window.key, picked)
        moved = window.back_seconds + (window.out_seconds if is_dirty else 0.0)
        late = link.find_late(window, begin + int(found[0]), begin + int(found[-1]) + 1, is_dirty=is_dirty)
        return (moved + exposed * late) / gain

    def is_dirty(self, key: Key, picked: Collection[Key]) -> bool:
        """Return True if something has written to a storage since the last chosen gap in which it left."""
        storage, index = key
        gaps, home = self._trace.state_gaps[storage], self._trace.storages[storage]
        wraps = home.created < 0 and home.released == self._trace.end
        for place in range(index, index - len(gaps) if wraps else -1, -1):
            if gaps[place % len(gaps)].opens in self._written[storage]:
                return True
            if (wraps or place) and (storage, (place - 1) % len(gaps)) in picked:
                return False
        return not wraps

    def _take(self, excess: Curve, window: Window, sign: int) -> None:
        self._cycle.add(excess, window.first + 1, window.until, sign * window.nbytes)

    # -- ticks ----------------------------------------------------------------------------------------------------

    def _set_ticks(self, excess: Curve, chosen: Sequence[Window], traffic: Traffic) -> tuple[Decision, ...]:
        """Shorten the chosen gaps as far as memory allows: the later releases first, then the earlier reloads."""
        cycle = self._cycle
        released: dict[Key, int] = {}
        for window, ideal in self._list_releases(chosen, traffic):
            latest = min(ideal, window.latest)
            over = np.flatnonzero(cycle.view(excess, window.first + 1, latest + 1) + window.nbytes > 0)
            if len(over):
                latest = window.first + int(over[0])
            release = max(window.first, cycle.move_at_or_before(latest))
            cycle.add(excess, window.first + 1, release + 1, window.nbytes)
            released[window.key] = release
        times = []
        for window, ideal in self._list_reloads(chosen, traffic):
            release = released[window.key]
            back = window.last
            if window.back_seconds and release + 1 < window.last:
                earliest = max(ideal, cycle.move_at_or_after(release + 1))
                over = np.flatnonzero(cycle.view(excess, earliest, window.until) + window.nbytes > 0)
                if len(over):
                    earliest = cycle.move_at_or_after(earliest + int(over[-1]) + 1)
                back = min(window.last, earliest)
                cycle.add(excess, back, window.until, window.nbytes)
            if release + 1 < min(back, window.until):
                times.append((window, release, back))
        return self.decide(times)

    def _list_releases(self, chosen: Sequence[Window], traffic: Traffic) -> list[tuple[Window, int]]:
        """Return each gap with the tick by which the link has copied its storage, in order of time."""
        keys, begins = {window.key for window in chosen}, self._cycle.begins
        copies: list[tuple[float, Window | None, float]] = [(begin, None, seconds) for begin, seconds in traffic.out]
        for window in chosen:
            seconds = window.out_seconds if self.is_dirty(window.key, keys) else 0.0
            copies.append((float(begins[window.opens + 1]), window, seconds))
        copies.sort(key=lambda copy: (copy[0], copy[1].key if copy[1] else (-1, 0)))
        found: list[tuple[Window, int]] = []
        free = 0.0
        for _ in range(2):  # copies of the step before may still be under way
            found = []
            for done, each, seconds in copies:
                if seconds:
                    free = done = max(free, done) + seconds
                if each is not None:
                    found.append((each, max(each.first, self._cycle.move_done_by(done))))
            free = max(0.0, free - self._cycle.step_seconds)
        return found

    def _list_reloads(self, chosen: Sequence[Window], traffic: Traffic) -> list[tuple[Window, int]]:
        """Return each gap with the latest tick at which its reload arrives in time, in order of need."""
        cycle = self._cycle
        share = 1.0
        if self._replay.costs.link.half_duplex and (back := sum(each.back_seconds for each in chosen)):
            share += sum(each.out_seconds for each in chosen) / back  # copies out take their part of the link
        copies: list[tuple[float, Window | None, float]] = []
        copies += [(begin + seconds, None, seconds) for begin, seconds in traffic.back]
        copies += [(float(cycle.begins[each.last % cycle.end]), each, share * each.back_seconds) for each in chosen]
        copies.sort(key=lambda copy: (-copy[0], copy[1].key if copy[1] else (-1, 0)))
        found: list[tuple[Window, int]] = []
        free = np.inf
        for _ in range(2):  # reloads for the next step may begin in this one
            found = []
            for due, each, seconds in copies:
                free = min(free, due) - seconds
                if each is not None:
                    later = cycle.step_seconds if each.last >= cycle.end else 0.0
                    found.append((each, cycle.move_begun_by(free + later)))
            free += cycle.step_seconds
        return found[::-1]

    def decide(self, times: Sequence[tuple[Window, int, int]]) -> tuple[Decision, ...]:
        """Return decisions of gaps with their ticks of release and reload, counted from this step's begin."""
        end = self._cycle.end
        decisions = []
        for window, release, back in times:
            storage, index = window.key
            gap = self._trace.state_gaps[storage][index]
            closes = gap.opens + gap.length(end)
            decisions.append(
                Decision(storage=storage, gap=index, choice=Choice.OFFLOAD, leave=gap.opens, release=release % end,
                         back=gap.closes if back == closes else back % end, segment=-1)
            )  # fmt: skip
        return tuple(sorted(decisions, key=lambda each: (each.storage, each.gap)))


class _Below:
    """Room for copies of the state in the tiers below: one for each storage that ever leaves."""

    def __init__(self, most_bytes: int | None) -> None:
        self._left, self._storages = most_bytes, set[int]()

    def take(self, window: Window) -> bool:
        """Take room for a storage. Return False if there is none."""
        storage = window.key[0]
        if storage not in self._storages and self._left is not None:
            if window.nbytes > self._left:
                return False
            self._left -= window.nbytes
        self._storages.add(storage)
        return True
