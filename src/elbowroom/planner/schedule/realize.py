"""Turns the gaps that a hybrid strategy offloads or drops into ticks, replays and memory use.

1. Schedule replays in order of time. An intermediate result stays if memory suffices until its need (collective
   recomputation); otherwise it is recomputed for that need.
2. Reload what a replay reads before it runs.
3. Schedule copies under the limit, with the waits that this takes (`timing.CopyTimetable.hold_under`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.assembly import Keeps, ReplayStep, assemble, list_replays
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import CopyTimetable, Times


@dataclasses.dataclass(frozen=True, slots=True)
class RealizedChoices:
    """The schedule that choices lead to.

    Attributes:
        times: of the offloads.
        replays: in order of time.
        load: memory use, the same as in a forecast of the plan.
    """

    times: dict[Key, Times]
    replays: tuple[ReplayStep, ...]
    load: MemoryCurve

    def find_drops_at_peak(self, drafter: Drafter, limit_bytes: int) -> list[Key]:
        """Return the dropped gaps whose replays raise memory use where it exceeds the limit.

        These are replays that exceed the limit themselves, and replays that keep a block on the device at the peak,
        because they read it or because what they read is saved only later. If there are none: intermediate results that
        stayed.
        """
        found = {replay.fills[0] for replay in self.replays if self.load.live[replay.tick] > limit_bytes}
        peak_tick = self.load.peak_tick
        present = {
            key[0]
            for key in self.load.spanning(peak_tick)
            if key in self.times and not self.times[key].release < peak_tick < self.times[key].back
        }
        for replay in self.replays:
            if replay.tick <= peak_tick and present & set(replay.segment.leaves):
                found.add(replay.fills[0])
            drops = zip(replay.fills, replay.leaves, strict=True)
            found |= {key for key, leave in drops if drafter.gaps[key].opens < peak_tick <= leave}
        kept = (key for replay in self.replays if replay.tick <= peak_tick for key in replay.fills[1:])
        return sorted(found or (key for key in kept if drafter.gaps[key].closes > peak_tick))

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """Return the choices as a plan."""
        return assemble(problem.drafter, strategy, problem.budget_bytes, offloads=self.times, replays=self.replays)


def realize(
    problem: Problem,
    timetable: CopyTimetable,
    plain: MemoryCurve,
    offloaded: Collection[Key],
    dropped: Collection[Key],
    keeps: Keeps | None = None,
    since: Mapping[Key, int] | None = None,
) -> RealizedChoices | Key:
    """Return the schedule that the choices lead to; or the key of a dropped gap that no replay can fill.

    A storage that was offloaded once has a host copy until its claim ends: if it is dropped in a later gap, it is
    reloaded instead.

    Args:
        plain: memory use of the plain step; it is not changed.
        keeps: whether an intermediate result of a replay stays; if None, it stays where memory suffices.
        since: when storages are dropped, for those that are not dropped when their gap opens.

    Cost: linear in the ops replayed, and for each wait in ticks.
    """
    reloaded = find_copied(problem.drafter, offloaded) & set(dropped)
    offloaded, dropped = {*offloaded, *reloaded}, set(dropped) - reloaded
    counter = _LoadCounter(problem, plain, offloaded, dropped, keeps)
    replays: list[ReplayStep] = []
    for replay in list_replays(problem.drafter, dropped, counter.keeps, since):
        if not isinstance(replay, ReplayStep):
            return replay
        counter.count(replay)
        replays.append(replay)
    for key, by in counter.wanted.items():
        counter.load.put(key, problem.drafter.gaps[key].opens, by)
    times = timetable.hold_under(counter.load, counter.wanted, problem.budget_bytes)
    return RealizedChoices(times=times, replays=tuple(replays), load=counter.load)


def find_copied(drafter: Drafter, offloaded: Collection[Key]) -> set[Key]:
    """Return the gaps that open while a host copy from an earlier gap exists."""
    first: dict[tuple[int, int], int] = {}
    for storage, index in sorted(offloaded, reverse=True):
        first[storage, drafter.graph.claim_at(storage, drafter.gaps[storage, index].closes)] = index
    return {
        (storage, index)
        for (storage, index), gap in drafter.gaps.items()
        if index > first.get((storage, drafter.graph.claim_at(storage, gap.closes)), index)
    }


class _LoadCounter:
    """Memory use while replays are scheduled, with every offloaded storage away for its whole gap."""

    def __init__(
        self,
        problem: Problem,
        plain: MemoryCurve,
        offloaded: Collection[Key],
        dropped: Collection[Key],
        keeps: Keeps | None,
    ) -> None:
        self._has_place = keeps or self._has_room
        self._drafter: Drafter = problem.drafter
        self._storages = problem.drafter.replay.trace.storages
        self._limit_bytes = problem.budget_bytes
        self.load = plain.copy()
        self.wanted = {key: self._drafter.gaps[key].closes for key in offloaded}
        self._offloaded: dict[int, list[Key]] = {}
        for key in sorted(offloaded):
            self._offloaded.setdefault(key[0], []).append(key)
        for key in (*offloaded, *dropped):
            self.load.take_all(key)

    def keeps(self, key: Key, tick: int) -> bool:
        """Decide whether an intermediate result stays; if so, count it."""
        # While the program holds the old block, both would take memory.
        keeps = self._storages[key[0]].released <= tick and self._has_place(key, tick)
        if keeps:
            self.load.put(key, tick - 1, self._drafter.gaps[key].closes)
        return keeps

    def _has_room(self, key: Key, tick: int) -> bool:
        room = self._limit_bytes - int(self.load.live[tick : self._drafter.gaps[key].closes].max(initial=0))
        return self.load.nbytes[key] <= room

    def count(self, replay: ReplayStep) -> None:
        """Count the memory of a replay: transients, leaves it needs, and storages held until its leaves are saved."""
        load, tick = self.load, replay.tick
        load.live[tick] += self._drafter.replay.footprints.measure(replay.segment, replay.segment.outputs).extra_bytes
        for key, leave in zip(replay.fills, replay.leaves, strict=True):
            load.put(key, self._drafter.gaps[key].opens, leave + 1)
        for leaf in replay.segment.leaves:
            for key in self._offloaded.get(leaf, ()):
                if self._drafter.gaps[key].opens < tick < self.wanted[key]:
                    load.put(key, tick - 1, self.wanted[key])
                    load.live[tick : self._storages[leaf].released] += load.nbytes[key]
                    self.wanted[key] = tick
