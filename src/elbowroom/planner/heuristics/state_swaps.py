"""Swaps of the model's state one at a time, for planners that treat it as one more kind of block.

this step      | forward  backward  update [out]           |
the next one   |               peak                [back] update
                 the copy out is done by the peak, and the copy back begins after it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elbowroom.ir.plan import Decision
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.state.cyclic_link import CyclicLink
from elbowroom.planner.state.scheduler import StateScheduler
from elbowroom.planner.state.windows import Cycle, Window, list_windows


class StateSwaps:
    """The gaps of the state, and the swaps chosen so far.

    Args:
        load: memory use, from which swaps are subtracted.
        channel: the copies of all blocks, in both directions.
    """

    def __init__(self, problem: Problem, load: MemoryCurve, channel: LinkTimetable) -> None:
        replay = problem.drafter.replay
        self._load, self._cycle = load, Cycle(replay)
        self._scheduler = StateScheduler(replay, problem.drafter.min_bytes)
        self._link = CyclicLink(self._cycle, channel, channel)
        self._windows = list_windows(replay, self._cycle, problem.drafter.min_bytes, {})
        self._times: dict[Key, tuple[Window, int, int]] = {}

    @property
    def chosen(self) -> Mapping[Key, tuple[Window, int, int]]:
        """The swaps: each gap with the ticks of its release and its reload."""
        return dict(self._times)

    def spanning(self, tick: int) -> list[Window]:
        """Return the gaps, not chosen yet, in which a storage can be gone at a tick."""
        return [each for each in self._windows if each.key not in self._times and self._find_tick(each, tick) >= 0]

    def is_away(self, storage: int, tick: int) -> bool:
        """Return True if a chosen swap has a storage away at a tick."""
        end = self._cycle.end
        return any(
            key[0] == storage and (release < tick < back or release < tick + end < back)
            for key, (_, release, back) in self._times.items()
        )

    def swap(self, window: Window, peak_tick: int, read: Sequence[int]) -> bool:
        """Swap a storage around the peak if the link has time. Return whether it has.

        Args:
            read: ticks at which replays read the storage.
        """
        cycle, is_dirty = self._cycle, self._scheduler.is_dirty(window.key, self._times)
        peak = self._find_tick(window, peak_tick)
        gone = self._link.find_gone(window, is_dirty=is_dirty)
        release = max(window.first, cycle.move_done_by(gone))
        back = window.last
        if window.back_seconds:
            back = cycle.move_begun_by(self._link.find_reload(window))
        if release > window.latest or not release < peak < min(back, window.until):
            return False
        if any(release < tick < back or release < tick + cycle.end < back for tick in read):
            return False
        self._link.take(window, is_dirty=is_dirty)
        self._times[window.key] = (window, release, back)
        cycle.add(self._load.live, release + 1, min(back, window.until), -window.nbytes)
        return True

    def decide(self, chosen: Mapping[Key, tuple[Window, int, int]]) -> tuple[Decision, ...]:
        """Return the decisions of chosen swaps."""
        return self._scheduler.decide(list(chosen.values()))

    def count_below(self) -> int:
        """Return the bytes of the copies of the state."""
        return sum({window.key[0]: window.nbytes for window, _, _ in self._times.values()}.values())

    def _find_tick(self, window: Window, tick: int) -> int:
        """Return a tick as counted in the window, perhaps of the next step; -1 if it lies outside."""
        for each in (tick, tick + self._cycle.end):
            if window.first < each < window.until:
                return each
        return -1
