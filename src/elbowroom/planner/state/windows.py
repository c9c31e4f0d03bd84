"""Windows: the ticks in which a storage of the model's state can be away; and curves over the ticks of a cycle.

op at opens                                         op at closes
[==========]......................................[============]
             ^ first: the earliest release    last: the latest reload
                         ^ pin: a replay reads the storage, so the window ends before, or begins after it
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.planner.schedule.draft import Key
from elbowroom.simulator.planned import PreparedTrace

Array = npt.NDArray[Any]
Curve = npt.NDArray[np.int64]
"""Bytes at each tick of a step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a gap in which a storage can be away. Ticks of the next step are counted on from this one's end.

    Attributes:
        key: storage and gap.
        opens: tick at which the gap opens.
        first: earliest tick of the release.
        latest: latest tick of the release; what a step makes is released in that step.
        last: latest tick of the reload; where the gap closes, unless a replay reads the storage before.
        until: from here on its absence frees nothing: `last`, or the end of the step that releases the storage.
        nbytes: that its absence frees.
        out_seconds, back_seconds: times of the copies; a gradient that is released in the gap is not copied back.
    """

    key: Key
    opens: int
    first: int
    latest: int
    last: int
    until: int
    nbytes: int
    out_seconds: float
    back_seconds: float


class Cycle:
    """The ticks of a step that follows itself, in seconds of the plain step.

    Attributes:
        end: number of ticks.
        ticks: ticks at which the state moves, of this step and the next one.
        begins: begin of each entry of this step and the next one.
        weights: seconds of each tick; a little more than 0 for those without a duration.
    """

    def __init__(self, replay: PreparedTrace) -> None:
        trace = replay.trace
        self.end = trace.end
        self.step_seconds = replay.begin_list[-1] + replay.costs.overhead_seconds
        self.ticks = [*trace.state_ticks, *(tick + self.end for tick in trace.state_ticks)]
        begins = replay.begin_list[: self.end]
        self.begins = np.array([*begins, *(self.step_seconds + each for each in begins), 2 * self.step_seconds])
        self.weights = np.diff(self.begins[: self.end + 1]) + max(self.step_seconds, 1e-9) * 1e-6
        self._move_begins = self.begins[self.ticks]
        self._move_ends = self.begins[np.array(self.ticks, dtype=np.int64) + 1] if self.ticks else self.begins[:0]

    def add(self, curve: Curve, begin: int, stop: int, nbytes: int) -> None:
        """Add bytes to a curve at ticks of this step and the next one."""
        end = self.end
        if begin < end:
            curve[begin : min(stop, end)] += nbytes
        if stop > end:
            curve[max(begin - end, 0) : stop - end] += nbytes

    def view(self, curve: Array, begin: int, stop: int) -> Array:
        """Return the part of a curve at ticks of this step and the next one."""
        end = self.end
        if stop <= end:
            return curve[begin:stop]
        if begin >= end:
            return curve[begin - end : stop - end]
        return np.concatenate((curve[begin:], curve[: stop - end]))

    def move_at_or_before(self, tick: int) -> int:
        """Return the last tick at or before another one at which the state moves; -1 if there is none."""
        index = bisect.bisect_right(self.ticks, tick) - 1
        return self.ticks[index] if index >= 0 else -1

    def move_at_or_after(self, tick: int) -> int:
        """Return the first tick at or after another one at which the state moves; after both steps if there is none."""
        index = bisect.bisect_left(self.ticks, tick)
        return self.ticks[index] if index < len(self.ticks) else 2 * self.end

    def move_done_by(self, seconds: float) -> int:
        """Return the first tick after whose op a time has passed; beyond both steps if there is none."""
        index = int(np.searchsorted(self._move_ends, seconds - 1e-12))
        return self.ticks[index] if index < len(self.ticks) else 2 * self.end

    def move_begun_by(self, seconds: float) -> int:
        """Return the last tick whose op begins by a time; -1 if there is none."""
        index = int(np.searchsorted(self._move_begins, seconds + 1e-12, side="right")) - 1
        return self.ticks[index] if index >= 0 else -1


def list_windows(
    replay: PreparedTrace, cycle: Cycle, min_bytes: int, pins: Mapping[int, Collection[int]]
) -> list[Window]:
    """Return the windows in which state can leave the device, by storage and gap.

    Args:
        min_bytes: smaller storages stay.
        pins: ticks at which replays read a storage, by storage id.
    """
    trace, link = replay.trace, replay.costs.link
    found = []
    for storage, gaps in trace.state_gaps.items():
        home = trace.storages[storage]
        if home.nbytes < min_bytes:
            continue
        out_seconds, back_seconds = offload_seconds(link, home.nbytes), reload_seconds(link, home.nbytes)
        is_gone = home.created >= 0 and storage not in trace.earlier_gradients
        for gap in gaps:
            closes = gap.opens + gap.length(trace.end)
            is_reloaded = trace.is_reloaded(gap)
            span = _find_free(cycle, gap.opens, closes, sorted(_unroll(pins.get(storage, ()), trace.end)), is_reloaded)
            if span is None:
                continue
            first, last = span
            until = min(last, trace.end) if is_gone else last
            latest = until - 1 if home.created < 0 else min(until, trace.end) - 1
            if first > latest or first + 1 >= until:
                continue
            found.append(
                Window(
                    key=(storage, gap.index), opens=gap.opens, first=first, latest=latest, last=last, until=until,
                    nbytes=int(replay.rounded[storage]), out_seconds=out_seconds,
                    back_seconds=back_seconds if is_reloaded else 0.0,
                )
            )  # fmt: skip
    return found


def _unroll(ticks: Collection[int], end: int) -> Iterator[int]:
    for tick in ticks:
        yield tick
        yield tick + end


def _find_free(cycle: Cycle, opens: int, closes: int, pins: Sequence[int], is_reloaded: bool) -> tuple[int, int] | None:
    """Return the longest part of a gap, as ticks of release and reload, in which no replay reads the storage."""
    within = [tick for tick in pins if opens < tick < closes]
    edges = [(opens, cycle.move_at_or_before(within[0]) if within else closes)] if is_reloaded or not within else []
    if within:
        edges += [
            (cycle.move_at_or_after(one), cycle.move_at_or_before(other)) for one, other in itertools.pairwise(within)
        ]
        edges.append((cycle.move_at_or_after(within[-1]), closes))
    if within and not is_reloaded:
        edges = edges[-1:]
    edges = [(release, back) for release, back in edges if opens <= release < back <= closes]
    return max(edges, key=lambda edge: edge[1] - edge[0], default=None)
