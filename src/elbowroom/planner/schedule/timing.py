"""When the copies of chosen gaps leave and come back: out as early as the link allows, back as late as it allows.

    out lane    [ a ][  b  ][ c ]                       in order of leaving, one after the other
    back lane                        [ c ][  b  ][ a ]  laid out backwards from the needs
    load        ------\\___\\______________/______/----   freed where a copy ends, taken where one begins

Two ways to end it: with nothing ever waiting, whatever the load is then (`lay_out`); or with the load under a limit,
whatever has to wait (`hold_under`).

Source: J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient memory management for GPU-based deep learning
systems", 2019 (AutoSwap), and the schedule of swaps in the authors' code. Inferred: what a link with one lane for both
directions does; and a copy that is still below is not made again, since the runtime does not make it either.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.trace import Trace
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.schedule.memory_curve import MemoryCurve


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Ticks of an offload: the device's copy is given up at `release`, and the reload begins at `back`.

    The copy out begins at `leave`; if that is None, where the gap opens.
    """

    release: int
    back: int
    leave: int | None = None


def list_moments(trace: Trace) -> list[int]:
    """The ticks at which moves can happen: saves and needs."""
    return sorted({save.tick for save in trace.saves} | {need.tick for need in trace.needs})


class CopyTimetable:
    """Lays out copies in the time of the plain step."""

    def __init__(self, drafter: Drafter) -> None:
        self._gaps, self._begins, self._graph = drafter.gaps, drafter.begins, drafter.graph
        self._link = drafter.replay.costs.link
        self._storages = drafter.replay.trace.storages
        self._ticks = list_moments(drafter.replay.trace)
        self._seconds = [self._begins[tick] for tick in self._ticks]

    def lay_out(self, keys: Iterable[Key]) -> dict[Key, Times]:
        """Times with which nothing waits. A gap that is too short for its copies is left out.

        Cost: quadratic in the gaps at worst, where one after the other is left out.
        """
        kept = {key: self._gaps[key].closes for key in keys}
        while True:
            releases, out_lane = self._lay_out_leaving(kept, stay=True)
            found = self._lay_out_just_in_time(releases, out_lane)
            if found.keys() == kept.keys():
                return found
            kept = {key: kept[key] for key in found}  # without the copies of the others

    def hold_under(self, load: MemoryCurve, wanted: Mapping[Key, int], limit_bytes: int) -> dict[Key, Times]:
        """Times with which the load is under a limit wherever these gaps can bring it there.

        Where a copy out is not done in time, the step waits for it; a reload begins when there is room for it, if need
        be only when its storage is wanted.

        Args:
            load: without these gaps; it is left with them taken out.
            wanted: the gaps, and the tick by which each must be back: its end, or an earlier replay that reads it.

        Cost: for each wait, linear in ticks.
        """
        releases, _ = self._lay_out_leaving(wanted, stay=False)
        for key, release in releases.items():
            load.take(key, release, wanted[key])
        self._force(load, releases, wanted, limit_bytes)
        backs = self._lay_out_coming(releases, wanted)
        found: dict[Key, Times] = {}
        previous = 0
        for key in sorted(releases, key=lambda key: (wanted[key], key)):
            by, release = wanted[key], releases[key]
            load.put(key, release, by)
            back = min(by, max(backs[key], previous))
            if back < by:
                over = np.flatnonzero(load.live[back:by] > limit_bytes)
                if len(over):
                    back = min(by, self.moment_from(back + int(over[-1]) + 1))
            load.take(key, release, back)
            found[key] = Times(release, back)
            previous = back
        return found

    # -- out ------------------------------------------------------------------------------------------------------

    def _lay_out_leaving(self, wanted: Mapping[Key, int], *, stay: bool) -> tuple[dict[Key, int], LinkTimetable]:
        """The release of each, in order of leaving, and when the lane is taken.

        What is wanted before its copy is done stays (`stay`), or is given up at once.
        """
        releases: dict[Key, int] = {}
        ends: dict[tuple[int, int], float] = {}  # of the copy, by storage and claim
        lane, lane_free = LinkTimetable(), 0.0
        for key in sorted(wanted, key=lambda key: (self._gaps[key].opens, key)):
            gap = self._gaps[key]
            copy = (key[0], self._graph.claim_at(key[0], gap.closes))
            begin, seconds = max(lane_free, self._begins[gap.opens]), offload_seconds(self._link, self._nbytes(key))
            end = ends.get(copy, begin + seconds)
            release = self.moment_at(end, gap.opens)
            if release >= wanted[key]:
                if stay:
                    continue
                release = gap.opens
            if copy not in ends:
                ends[copy] = lane_free = end
                lane.take(begin, seconds)
            releases[key] = release
        return releases, lane

    def _force(self, load: MemoryCurve, releases: dict[Key, int], wanted: Mapping[Key, int], limit_bytes: int) -> None:
        """Wait for copies, the oldest first, where the load would be over the limit before they are done."""
        tick = 0
        while True:
            over = load.live[tick:] > limit_bytes
            if not releases or not over.any():
                return
            tick += int(over.argmax())
            before = self._ticks[max(0, bisect.bisect_left(self._ticks, tick) - 1)]
            for key, release in releases.items():
                if before < release and load.gone[key] <= tick < wanted[key] and tick <= release:
                    load.put(key, release, wanted[key])
                    releases[key] = max(self._gaps[key].opens, before)
                    load.take(key, releases[key], wanted[key])
                    break
            else:
                tick += 1

    # -- back -----------------------------------------------------------------------------------------------------

    def _lay_out_just_in_time(self, releases: dict[Key, int], out_lane: LinkTimetable) -> dict[Key, Times]:
        found: dict[Key, Times] = {}
        lane, follower = float("inf"), (len(self._ticks), -1)
        for key in sorted(releases, key=lambda key: (-self._gaps[key].closes, key)):
            end = min(lane, self._begins[self._gaps[key].closes])
            begin = end - reload_seconds(self._link, self._nbytes(key))
            event = bisect.bisect_right(self._seconds, begin) - 1
            # Reloads of one event begin in order of storage: this one must be ahead of the next to be needed.
            if (event, key[0]) >= follower:
                event = follower[0] - 1
            if event < 0 or self._ticks[event] < self.earliest_back(key, releases[key]):
                continue
            at = self._seconds[event]
            if self._link.half_duplex and out_lane.earliest(at, end - at) > at:
                continue  # a copy out is in the way
            lane, follower = begin, (event, key[0])
            found[key] = Times(releases[key], self._ticks[event])
        return found

    def _lay_out_coming(self, releases: dict[Key, int], wanted: Mapping[Key, int]) -> dict[Key, int]:
        """Where each reload would begin, if there were room."""
        backs: dict[Key, int] = {}
        lane = float("inf")
        for key in sorted(releases, key=lambda key: (-wanted[key], key)):
            lane = min(lane, self._begins[wanted[key]]) - reload_seconds(self._link, self._nbytes(key))
            backs[key] = min(wanted[key], max(self.moment_before(lane), self.earliest_back(key, releases[key])))
        return backs

    def _nbytes(self, key: Key) -> int:
        return self._storages[key[0]].nbytes

    def earliest_back(self, key: Key, release: int) -> int:
        """Where a reload may begin at the earliest: not while the program still holds the old block."""
        return self.moment_from(max(release + 1, self._storages[key[0]].released))

    def moment_from(self, tick: int) -> int:
        """The first save or need not before a tick."""
        index = bisect.bisect_left(self._ticks, tick)
        return self._ticks[min(index, len(self._ticks) - 1)]

    def moment_before(self, seconds: float) -> int:
        """The last save or need that is not later than a time."""
        return self._ticks[max(0, bisect.bisect_right(self._seconds, seconds) - 1)]

    def moment_at(self, seconds: float, tick: int) -> int:
        """The first save or need not before a tick and not earlier than a time."""
        index = max(bisect.bisect_left(self._seconds, seconds), bisect.bisect_left(self._ticks, tick))
        return self._ticks[min(index, len(self._ticks) - 1)]
