"""Gaps to offload and gaps to drop -> ticks, replays, load, plan: what the choices of a hybrid strategy come to.

1. Replays, in order of time. What one makes on its way stays if there is room for it until it is needed (collective
   recomputation), and is made anew for its own need if not.
2. What a replay reads is back by then.
3. Copies under the limit, with their waits (`timing.CopyTimetable.hold_under`).
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
    """What choices come to.

    Attributes:
        times: of the offloads.
        replays: in order.
        load: with everything counted, as a forecast of the plan would.
    """

    times: dict[Key, Times]
    replays: tuple[ReplayStep, ...]
    load: MemoryCurve

    def blame(self, drafter: Drafter, limit_bytes: int) -> list[Key]:
        """The dropped gaps without whose replays there would be less where the load is over a limit.

        Replays that take too much themselves; and those that have a block there at the peak, because they read it, or
        because what they read is saved only later. Without any of these: what was made on the way and stayed.
        """
        found = {replay.fills[0] for replay in self.replays if self.load.live[replay.tick] > limit_bytes}
        peak_tick = self.load.peak_tick
        there = {
            key[0]
            for key in self.load.spanning(peak_tick)
            if key in self.times and not self.times[key].release < peak_tick < self.times[key].back
        }
        for replay in self.replays:
            if replay.tick <= peak_tick and there & set(replay.segment.leaves):
                found.add(replay.fills[0])
            drops = zip(replay.fills, replay.leaves, strict=True)
            found |= {key for key, leave in drops if drafter.gaps[key].opens < peak_tick <= leave}
        kept = (key for replay in self.replays if replay.tick <= peak_tick for key in replay.fills[1:])
        return sorted(found or (key for key in kept if drafter.gaps[key].closes > peak_tick))

    def plan(self, problem: Problem, strategy: str) -> Plan:
        """Written as a plan."""
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
    """What the choices come to; a dropped gap that cannot be filled, if there is one.

    What was offloaded once has its copy below for as long as it is claimed: dropped later on, it is reloaded.

    Args:
        plain: the load without them; it is not changed.
        keeps: whether what a replay makes on its way stays; if None, where there is room.
        since: when storages are dropped, where that is later than their gaps begin.

    Cost: linear in the ops replayed, and for each wait in ticks.
    """
    reloaded = find_copied(problem.drafter, offloaded) & set(dropped)
    offloaded, dropped = {*offloaded, *reloaded}, set(dropped) - reloaded
    ledger = _Ledger(problem, plain, offloaded, dropped, keeps)
    replays: list[ReplayStep] = []
    for replay in list_replays(problem.drafter, dropped, ledger.keeps, since):
        if not isinstance(replay, ReplayStep):
            return replay
        ledger.count(replay)
        replays.append(replay)
    for key, by in ledger.wanted.items():
        ledger.load.put(key, problem.drafter.gaps[key].opens, by)
    times = timetable.hold_under(ledger.load, ledger.wanted, problem.budget_bytes)
    return RealizedChoices(times=times, replays=tuple(replays), load=ledger.load)


def find_copied(drafter: Drafter, offloaded: Collection[Key]) -> set[Key]:
    """The gaps that open while there is a copy below from an earlier gap."""
    first: dict[tuple[int, int], int] = {}
    for storage, index in sorted(offloaded, reverse=True):
        first[storage, drafter.graph.claim_at(storage, drafter.gaps[storage, index].closes)] = index
    return {
        (storage, index)
        for (storage, index), gap in drafter.gaps.items()
        if index > first.get((storage, drafter.graph.claim_at(storage, gap.closes)), index)
    }


class _Ledger:
    """The load while replays are gone through, with offloads away for as long as they could be."""

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
        """Whether what a replay makes on its way stays; it is counted then."""
        # While the program holds the old block, both would be there.
        keeps = self._storages[key[0]].released <= tick and self._has_place(key, tick)
        if keeps:
            self.load.put(key, tick - 1, self._drafter.gaps[key].closes)
        return keeps

    def _has_room(self, key: Key, tick: int) -> bool:
        room = self._limit_bytes - int(self.load.live[tick : self._drafter.gaps[key].closes].max(initial=0))
        return self.load.nbytes[key] <= room

    def count(self, replay: ReplayStep) -> None:
        """Count what a replay takes for itself, what it needs back, and what stays until all that it reads is saved."""
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
