"""Schedules the copies of chosen gaps: out as early as the link allows, back as late as it allows.

    out lane    [ a ][  b  ][ c ]                       in order of opening, one after the other
    back lane                        [ c ][  b  ][ a ]  scheduled backwards from the needs
    memory      ------\\___\\______________/______/----   freed when a copy out ends, taken when a reload begins

There are two modes: the step never waits, whatever the memory use (`lay_out`); or memory use stays under a limit and
the step waits as needed (`hold_under`).

Source: J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient memory management for GPU-based deep learning
systems", 2019 (AutoSwap), and the schedule of swaps in the authors' code. Inferred: how a link with one lane for both
directions behaves; and that a copy that still exists on the host is not made again, since the runtime does not make it
either.
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
    """Ticks of an offload: the device's copy is released at `release`, and the reload begins at `back`.

    The copy out begins at `leave`, or when the gap opens if `leave` is None.
    """

    release: int
    back: int
    leave: int | None = None


def list_moments(trace: Trace) -> list[int]:
    """Return the ticks at which storages can move: saves and needs."""
    return sorted({save.tick for save in trace.saves} | {need.tick for need in trace.needs})


class CopyTimetable:
    """Schedules copies on the time axis of the plain step."""

    def __init__(self, drafter: Drafter) -> None:
        self._gaps = drafter.gaps
        self._begins = drafter.begins
        self._graph = drafter.graph
        self._link = drafter.replay.costs.link
        self._storages = drafter.replay.trace.storages
        self._ticks = list_moments(drafter.replay.trace)
        self._seconds = [self._begins[tick] for tick in self._ticks]

    def lay_out(self, keys: Iterable[Key]) -> dict[Key, Times]:
        """Return times with which the step never waits. A gap too short for its copies is left out.

        Cost: quadratic in the gaps at worst, if they are left out one by one.
        """
        kept = {key: self._gaps[key].closes for key in keys}
        while True:
            releases, out_lane = self._schedule_copies_out(kept, stay=True)
            found = self._lay_out_just_in_time(releases, out_lane)
            if found.keys() == kept.keys():
                return found
            kept = {key: kept[key] for key in found}  # again, without the copies of the gaps that were left out

    def hold_under(self, load: MemoryCurve, wanted: Mapping[Key, int], limit_bytes: int) -> dict[Key, Times]:
        """Return times that keep memory use under a limit wherever these gaps can.

        If a copy out does not finish in time, the step waits for it. A reload begins once memory suffices: at the
        latest when its storage is needed.

        Args:
            load: memory use without offloads of these gaps; on return the gaps are subtracted from it.
            wanted: by gap, the tick by which its storage must be back: the gap's end, or an earlier replay that reads
                it.

        Cost: for each wait, linear in ticks.
        """
        releases, _ = self._schedule_copies_out(wanted, stay=False)
        for key, release in releases.items():
            load.take(key, release, wanted[key])
        self._stall(load, releases, wanted, limit_bytes)
        backs = self._schedule_reloads(releases, wanted)
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

    def _schedule_copies_out(self, wanted: Mapping[Key, int], *, stay: bool) -> tuple[dict[Key, int], LinkTimetable]:
        """Return the release of each gap in order of opening, and the timetable of the out lane.

        A storage that is needed before its copy ends stays on the device (`stay`), or is released when its gap opens.
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

    def _stall(self, load: MemoryCurve, releases: dict[Key, int], wanted: Mapping[Key, int], limit_bytes: int) -> None:
        """Wait for copies, the oldest first, where memory use would exceed the limit before they end."""
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
            # Reloads of one event begin in order of storage id: this one must begin before the one that is needed next.
            if (event, key[0]) >= follower:
                event = follower[0] - 1
            if event < 0 or self._ticks[event] < self.earliest_back(key, releases[key]):
                continue
            at = self._seconds[event]
            if self._link.half_duplex and out_lane.earliest(at, end - at) > at:
                continue  # a copy out occupies the link
            lane, follower = begin, (event, key[0])
            found[key] = Times(releases[key], self._ticks[event])
        return found

    def _schedule_reloads(self, releases: dict[Key, int], wanted: Mapping[Key, int]) -> dict[Key, int]:
        """Return the tick at which each reload would begin if memory sufficed."""
        backs: dict[Key, int] = {}
        lane = float("inf")
        for key in sorted(releases, key=lambda key: (-wanted[key], key)):
            lane = min(lane, self._begins[wanted[key]]) - reload_seconds(self._link, self._nbytes(key))
            backs[key] = min(wanted[key], max(self.moment_before(lane), self.earliest_back(key, releases[key])))
        return backs

    def _nbytes(self, key: Key) -> int:
        return self._storages[key[0]].nbytes

    def earliest_back(self, key: Key, release: int) -> int:
        """Return the earliest tick of a reload: not while the program still holds the old block."""
        return self.moment_from(max(release + 1, self._storages[key[0]].released))

    def moment_from(self, tick: int) -> int:
        """Return the first save or need at or after a tick."""
        index = bisect.bisect_left(self._ticks, tick)
        return self._ticks[min(index, len(self._ticks) - 1)]

    def moment_before(self, seconds: float) -> int:
        """Return the last save or need at or before a time in seconds."""
        return self._ticks[max(0, bisect.bisect_right(self._seconds, seconds) - 1)]

    def moment_at(self, seconds: float, tick: int) -> int:
        """Return the first save or need at or after both a tick and a time in seconds."""
        index = max(bisect.bisect_left(self._seconds, seconds), bisect.bisect_left(self._ticks, tick))
        return self._ticks[min(index, len(self._ticks) - 1)]
