"""Capuchin: offload what can return without a wait, and recompute where that is cheaper than the wait.

1. Free time of a gap: from the end of its copy out to the last moment at which its reload may begin.
2. While memory use exceeds the budget: of the gaps that span its peak, take the one with the most free time for whose
   copies the link still has time: out before the peak, back after it. Planned copies do not overlap on the link.
3. If there is none, compare the wait that the next one would cause with the recomputation of the one that saves the
   most memory per second (MSPS), and take the cheaper.
4. An intermediate result of a replay stays if memory suffices (collective recomputation).
5. Feedback: a late reload begins earlier by 5 % of its time, again and again, as long as the budget holds.

Source: X. Peng, X. Shi, H. Dai, H. Jin, W. Ma, Q. Xiong, F. Yang, X. Qian, "Capuchin: Tensor-based GPU memory
management for deep learning", ASPLOS 2020, its hybrid policy (`planner.heuristics.msps`,
`planner.heuristics.feedback`); the measured accesses are here the saves and needs of the trace, at the times of the
plain step. Inferred: the text leaves open how much to save (here the excess over the budget at the peak, repeatedly
until there is none), what makes a trigger valid (rule 2), and whether a copy that is not out by the peak counts as a
wait (here it does). Ours: if a replay itself does not fit, its block is offloaded instead, and if nothing else fits,
everything is evicted at once and reloaded on demand. The passive first step is not imitated.

Cost: for each choice, linear in ticks and in the gaps at the peak; then some tens of simulated steps.
"""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.feedback import feed_back
from elbowroom.planner.heuristics.msps import Recomputation
from elbowroom.planner.problem import Problem, lowest_draft
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.realize import RealizedChoices, find_copied, realize
from elbowroom.planner.schedule.timing import CopyTimetable


def make_plan(problem: Problem) -> Plan:
    """Return the hybrid plan; if it does not fit, the plan with the lowest possible peak."""
    choices = _Choices(problem)
    realized = choices.make()
    if realized is not None:
        plan = feed_back(problem, choices.timetable, realized, "capuchin")
        if problem.fits(problem.drafter.replay.run(plan)):
            return plan
    return _evict_at_once(problem)


def _evict_at_once(problem: Problem) -> Plan:
    """Return the plan with the lowest peak; if the lower tier cannot hold everything, it evicts the largest blocks."""
    drafter = problem.drafter
    sizes = {key[0]: int(drafter.replay.rounded[key[0]]) for key in drafter.gaps}
    leaving: set[int] = set()
    room = sum(sizes.values()) if problem.host_bytes is None else problem.host_bytes
    for storage in sorted(sizes, key=lambda storage: (-sizes[storage], storage)):
        if sizes[storage] <= room:
            leaving.add(storage)
            room -= sizes[storage]
    draft = {key: option for key, option in lowest_draft(drafter).items() if key[0] in leaving}
    plan = drafter.finish(draft, "capuchin", problem.budget_bytes)
    assert plan is not None  # it drops nothing
    return plan


@dataclasses.dataclass(frozen=True, slots=True)
class _Swap:
    """An offload as it would be scheduled now. `exposed_seconds`: the wait that it would cause."""

    key: Key
    out_begin: float
    back_begin: float
    exposed_seconds: float


class _Choices:
    """The gaps offloaded and dropped so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._drafter = problem, problem.drafter
        self.timetable = CopyTimetable(problem.drafter)
        self._plain = MemoryCurve(problem.drafter, problem.plain.live_bytes)
        self._recomputation = Recomputation(problem.drafter, self._plain.nbytes)
        self._offloaded: set[Key] = set()
        link, storages = problem.drafter.replay.costs.link, problem.drafter.replay.trace.storages
        self._out = {key: offload_seconds(link, storages[key[0]].nbytes) for key in self._plain.keys}
        self._back = {key: reload_seconds(link, storages[key[0]].nbytes) for key in self._plain.keys}
        self._out_lane = LinkTimetable()
        self._back_lane = self._out_lane if link.half_duplex else LinkTimetable()
        self._by_free_time = sorted(self._plain.keys, key=lambda key: (-self._free_seconds(key), key))

    def _free_seconds(self, key: Key) -> float:
        gap, begins = self._drafter.gaps[key], self._drafter.begins
        return (begins[gap.closes] - self._back[key]) - (begins[gap.opens] + self._out[key])

    def make(self) -> RealizedChoices | None:
        """Choose until everything fits; return None if that is impossible.

        Every round chooses a gap, or replaces a recomputation for good.
        """
        load = self._plain.copy()
        while True:
            chose = self._choose_under(load)
            realized = realize(self._problem, self.timetable, self._plain, self._offloaded, self._recomputation.chosen)
            if not isinstance(realized, RealizedChoices):
                if not self._offload_instead([realized]):
                    return None
                continue
            load = realized.load.copy()
            if load.peak_bytes <= self._problem.budget_bytes:
                return realized
            if not chose and not self._offload_instead(
                realized.find_drops_at_peak(self._drafter, self._problem.budget_bytes)
            ):
                return None

    def _choose_under(self, load: MemoryCurve) -> bool:
        """Choose gaps until memory use is within the budget or no gap spans its peak; return whether any was chosen."""
        chose = False
        while load.peak_bytes > self._problem.budget_bytes:
            tick = load.peak_tick
            spanning = set(load.spanning(tick)) - self._offloaded - self._recomputation.chosen
            key = self._choose([key for key in self._by_free_time if key in spanning], tick)
            if key is None:
                break
            load.take_all(key)
            chose = True
        return chose

    def _choose(self, among: list[Key], peak_tick: int) -> Key | None:
        """Return the next gap by the rules; None if there is none."""
        swap: _Swap | None = None
        for key in filter(self._has_room_below, among):
            found = self._schedule(key, peak_tick)
            if found.exposed_seconds <= 0.0:
                return self._offload(found)
            swap = swap or found
        cheap = self._recomputation.best(among)
        if cheap is not None and (swap is None or self._recomputation.seconds(cheap) < swap.exposed_seconds):
            self._recomputation.choose(cheap)
            return cheap
        return self._offload(swap) if swap is not None else None

    def _schedule(self, key: Key, peak_tick: int) -> _Swap:
        """Schedule a copy out as early and back as late as the lanes are free, and compute the waits for both."""
        gap, begins = self._drafter.gaps[key], self._drafter.begins
        out_begin = self._out_lane.earliest(begins[gap.opens], self._out[key])
        gone = max(out_begin + self._out[key], begins[peak_tick])
        back_begin = self._back_lane.latest(begins[gap.closes], self._back[key])
        exposed = max(0.0, out_begin + self._out[key] - begins[peak_tick])
        if back_begin < gone:
            back_begin = self._back_lane.earliest(gone, self._back[key])
            exposed += max(0.0, back_begin + self._back[key] - begins[gap.closes])
        return _Swap(key, out_begin, back_begin, exposed)

    def _offload(self, swap: _Swap) -> Key:
        self._out_lane.take(swap.out_begin, self._out[swap.key])
        self._back_lane.take(swap.back_begin, self._back[swap.key])
        self._offloaded.add(swap.key)
        self._recomputation.refuse(swap.key)
        for key in find_copied(self._drafter, [swap.key]):
            self._out[key] = 0.0  # a host copy exists
            self._recomputation.refuse(key)
        return swap.key

    def _offload_instead(self, dropped: list[Key]) -> bool:
        """Offload gaps that were to be recomputed; return whether any was possible."""
        done = False
        for key in filter(self._has_room_below, dropped):
            self._offload(self._schedule(key, self._drafter.gaps[key].closes))
            done = True
        return done

    def _has_room_below(self, key: Key) -> bool:
        most_bytes = self._problem.host_bytes
        if most_bytes is None:
            return True
        sizes = {other[0]: self._plain.nbytes[other] for other in (*self._offloaded, key)}
        return sum(sizes.values()) <= most_bytes
