"""Plan evictions for the next step from the accesses of this one: copies behind the ops, or recomputation.

    bytes without eviction              .-''''-.
    budget  - - - - - - - - - - - - - -/- - - - \\- - -   the excess has to be evicted
    copies out                      [a][b][c]             serialized, each as soon as it is saved
    copies back                                [c][b][a]  serialized, each as late as possible

A copy is free if it is out before its memory is needed, and back before the storage is needed. Storages that are cheap
to recompute per byte are dropped instead; several thresholds between the two are tried.

Source: choosing by the access pattern of a first, measured iteration: X. Peng et al., "Capuchin", ASPLOS 2020.
Ours: a link with a queue in each direction, and memory demand as a curve over the step.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elbowroom.residency.access_history import AccessPattern, StepAccesses

Curve = npt.NDArray[np.float64]

SLOTS = 2048
"""Most points of the curve."""

WEIGHED = 1024
"""Most storages considered: those with the largest bytes x events."""

LINES = 8
"""Thresholds between dropping and copying to try, about."""

REPAIRED, MOST_REPAIRED = 3, 128
"""Drafts that are repaired, those with the least cost; and the most evictions that a repair adds."""

PACES = (1.0, 1.2, 1.5, 2.0, 3.0)
"""Slowdowns of the step to try, in this order, if free copies do not suffice."""


class ForeseenMove(NamedTuple):
    """The planned eviction of one saved storage.

    Attributes:
        is_copied: whether it is offloaded; otherwise it is dropped.
        back: the event at which its reload begins.
    """

    is_copied: bool
    back: int


@dataclasses.dataclass(slots=True)
class _Gap:
    use: AccessPattern
    begin: int  # the events that bound it
    end: int
    rate: float  # seconds per byte of recomputing it


def plan_prefetch(
    record: StepAccesses, budget_bytes: int, move_seconds: Callable[[int], tuple[float, float]]
) -> Mapping[int, ForeseenMove]:
    """Plan the evictions of a step with the recorded accesses, by the `place` of each storage.

    Args:
        move_seconds: maps bytes to the seconds of a copy out, and of a copy back.

    Cost: about `LINES` passes over at most `WEIGHED` storages, for each of `PACES`.
    """
    if not record.was_tight:
        return {}
    planner = _PrefetchPlanner(record, budget_bytes, move_seconds)
    return planner.find() if planner.gaps else {}


class _Shortage:
    """The bytes over budget, as a curve over the step: between events, and at each event, where replays run."""

    def __init__(self, record: StepAccesses, budget_bytes: int) -> None:
        self._positions = 2 * len(record.seconds) + 1  # 2 e before event e, 2 e + 1 at it
        self._slots = min(SLOTS, self._positions)
        bytes_ = np.zeros(self._positions)
        bytes_[0::2], bytes_[1::2] = record.demand_bytes, record.level_bytes
        self.excess = np.full(self._slots, -math.inf)
        slots = np.arange(self._positions) * self._slots // self._positions
        np.maximum.at(self.excess, slots, bytes_ - budget_bytes)

    def find_slot(self, event: int) -> int:
        """Return the slot of an event."""
        return (2 * event + 1) * self._slots // self._positions

    def find_slots(self, events: list[int]) -> npt.NDArray[np.int64]:
        """Return the slots of events."""
        return (2 * np.array(events, np.int64) + 1) * self._slots // self._positions

    def find_event(self, slot: int) -> int:
        """Return the event at a slot."""
        return slot * self._positions // self._slots // 2

    def find_cover(self, begin: int, end: int) -> tuple[int, int]:
        """Return the slots [first, last) between two events."""
        first = (2 * begin + 2) * self._slots // self._positions
        return first + (self._slots < self._positions), self.find_slot(end)


class _PrefetchPlanner:
    def __init__(
        self, record: StepAccesses, budget_bytes: int, move_seconds: Callable[[int], tuple[float, float]]
    ) -> None:
        self._move = move_seconds
        self._times = record.seconds
        self._curve = _Shortage(record, budget_bytes)
        self._needs = [nbytes - budget_bytes for nbytes in record.demand_bytes]
        gaps = [gap for use in dict.fromkeys(record.saves) if (gap := self._find_gap(use)) is not None]
        weighed = sorted(gaps, key=lambda gap: -gap.use.nbytes * (gap.end - gap.begin))[:WEIGHED]
        self.gaps = sorted(weighed, key=lambda gap: gap.use.place)
        self._place = {gap.use.place: index for index, gap in enumerate(self.gaps)}

    def find(self) -> Mapping[int, ForeseenMove]:
        rates = sorted({gap.rate for gap in self.gaps if gap.rate < math.inf})
        step = max(1, len(rates) // LINES)
        lines = [-1.0, *rates[step - 1 :: step], *rates[-1:]]
        best: tuple[float, Mapping[int, ForeseenMove]] = (math.inf, {})
        for pace in PACES:
            drafts = [self._try(line, pace) for line in lines]
            is_better = False
            is_enough = any(draft.excess.max() <= 0 for draft in drafts)
            for draft in sorted(drafts, key=self._find_cost)[:REPAIRED]:
                self._repair(draft, pace)
                cost = self._simulate(draft)
                if cost < best[0]:
                    best = cost, draft.roles
                    is_better = True
            if is_enough or not is_better:
                break
        return best[1]

    def _find_cost(self, draft: _Draft) -> float:
        """Return the cost of a draft in seconds, with a penalty for remaining excess."""
        return draft.seconds + 2 * sum(self._move(max(0, int(draft.excess.max()))))

    def _simulate(self, draft: _Draft) -> float:
        """Simulate a step with a draft; return the seconds beyond its ops, with a penalty for remaining excess."""
        saved: dict[int, list[int]] = {}
        backs: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        begins: dict[int, list[int]] = {}
        for index, gap in enumerate(self.gaps):
            role = draft.roles.get(gap.use.place)
            if role is None:
                continue
            ends.setdefault(draft.ends[index], []).append(index)
            if role.is_copied:
                saved.setdefault(gap.use.events[0], []).append(index)
                backs.setdefault(role.back, []).append(index)
            else:
                begins.setdefault(gap.begin, []).append(index)
        clock = out_free = back_free = before = 0.0
        covered = lacking = 0.0
        leaving: deque[tuple[float, int]] = deque()
        there: dict[int, float] = {}
        gone: set[int] = set()
        for event, seconds in enumerate(self._times):
            clock, before = clock + seconds - before, seconds
            for index in ends.get(event, ()):
                gap = self.gaps[index]
                if not draft.roles[gap.use.place].is_copied:
                    clock += gap.use.own_seconds
                    covered -= gap.use.nbytes
            for index in backs.get(event, ()):
                if index in gone:
                    covered -= self.gaps[index].use.nbytes
                    back_free = max(clock, back_free) + self._move(self.gaps[index].use.nbytes)[1]
                    there[index] = back_free
                gone.add(index)
            for index in ends.get(event, ()):
                clock = max(clock, there.get(index, 0.0))
            for index in saved.get(event, ()):
                out_free = max(clock, out_free) + self._move(self.gaps[index].use.nbytes)[0]
                leaving.append((out_free, index))
            covered += sum(self.gaps[index].use.nbytes for index in begins.get(event, ()))
            need = self._needs[event + 1]
            while leaving and (leaving[0][0] <= clock or need > covered):
                done, index = leaving.popleft()
                if index in gone:
                    continue
                clock = max(clock, done)
                gone.add(index)
                covered += self.gaps[index].use.nbytes
            lacking = max(lacking, need - covered)
        return clock - before + 2 * sum(self._move(int(max(0.0, lacking))))

    def _find_gap(self, use: AccessPattern) -> _Gap | None:
        """Return the longest gap between two uses, the second of which is a need; None if it cannot be used."""
        needs = set(use.needs)
        found: tuple[float, int, int] | None = None
        for begin, end in zip(use.events, use.events[1:], strict=False):
            if end in needs:
                length = self._times[end] - self._times[begin]
                if found is None or length > found[0]:
                    found = length, begin, end
        if found is None or not use.learnt or max(found[1], use.free) >= found[2]:
            return None
        return _Gap(use, max(found[1], use.free), found[2], use.own_seconds / max(1, use.nbytes))

    def _try(self, line: float, pace: float) -> _Draft:
        """Draft: copy storages above the threshold where that is free, and drop others as far as necessary."""
        ends = [gap.end for gap in self.gaps]
        dropped = sorted((gap.rate, index) for index, gap in enumerate(self.gaps) if gap.rate <= line)
        for is_first in (True, False):  # drops limit how long their leaves may be away
            draft = _Draft(self.gaps, self._place, self._curve)
            self._copy(draft, ends, line, pace)
            for _, index in dropped:
                if draft.excess.max() <= 0:
                    break
                draft.drop(index)
            if is_first:
                ends = draft.ends
        return draft

    def _copy(self, draft: _Draft, ends: list[int], line: float, pace: float) -> None:
        seconds = self._times
        back_free = math.inf
        for index, gap in enumerate(self.gaps):
            if gap.rate <= line:
                continue
            out, back = self._move(gap.use.nbytes)
            done = max(draft.out_free, pace * seconds[gap.use.events[0]]) + out
            start = min(back_free, pace * seconds[ends[index]]) - back
            if start <= done:
                continue
            first = max(gap.begin, bisect_left(seconds, done / pace))
            if draft.copy(index, first, bisect_right(seconds, start / pace) - 1):
                draft.out_free, back_free = done, start

    def _repair(self, draft: _Draft, pace: float) -> None:
        """Repair a draft: at the largest excess, evict the cheapest storage, even if the step waits for its copy."""
        nbytes = np.array([gap.use.nbytes for gap in self.gaps], float)
        own = np.array([gap.use.own_seconds for gap in self.gaps], float)
        out, back = np.array([self._move(gap.use.nbytes) for gap in self.gaps]).reshape(-1, 2).T
        first = np.array([self._curve.find_cover(gap.begin, gap.end)[0] for gap in self.gaps])
        is_out = np.array([gap.use.place in draft.roles for gap in self.gaps])
        for _ in range(MOST_REPAIRED):
            worst = int(draft.excess.argmax())
            last = self._curve.find_slots(draft.ends)
            wait = pace * self._times[min(self._curve.find_event(worst), len(self._times) - 1)]
            late = back + np.maximum(0, draft.out_free + out - wait)
            cost = np.minimum(late, own) / nbytes
            cost[is_out | (first > worst) | (last <= worst)] = math.inf
            if draft.excess[worst] <= 0 or not len(cost) or cost.min() == math.inf:
                return
            index = int(cost.argmin())
            is_out[index] = True
            if own[index] < late[index] and draft.drop(index):
                continue
            gap = self.gaps[index]
            if draft.copy(index, gap.begin, draft.ends[index]):
                draft.seconds += float(late[index])
                draft.out_free += float(out[index])


class _Draft:
    """The evictions chosen so far.

    Attributes:
        excess: bytes over budget, as a curve.
        ends: by gap, the event that needs the storage, directly or as a leaf of a recomputation.
        seconds: of replays, and of waiting for copies.
        out_free: when the last copy out is complete.
    """

    def __init__(self, gaps: list[_Gap], place: dict[int, int], curve: _Shortage) -> None:
        self._gaps = gaps
        self._place = place
        self._curve = curve
        self.excess = curve.excess.copy()
        self.ends = [gap.end for gap in gaps]
        self.roles: dict[int, ForeseenMove] = {}
        self.seconds = self.out_free = 0.0
        self._covers: dict[int, tuple[int, int]] = {}
        self._transient: dict[int, int] = {}  # by event, bytes that replays need besides their results

    def copy(self, index: int, begin: int, end: int) -> bool:
        """Offload a storage between two events, if that reduces excess; return whether it does."""
        first, last = self._curve.find_cover(begin, end)
        covered = self.excess[first:last]
        if not covered.size or covered.max() <= 0:
            return False
        use = self._gaps[index].use
        covered -= use.nbytes
        self._covers[index] = first, last
        self.roles[use.place] = ForeseenMove(True, end)
        return True

    def drop(self, index: int) -> bool:
        """Drop a storage until it is needed, if that reduces excess, with its leaves needed earlier; return whether."""
        gap, end = self._gaps[index], self.ends[index]
        first, last = self._curve.find_cover(gap.begin, end)
        covered = self.excess[first:last]
        if not covered.size or covered.max() <= 0:
            return False
        saved, over = self.excess.copy(), _count_over(self.excess)
        covered -= gap.use.nbytes
        self._covers[index] = first, last
        self.roles[gap.use.place] = ForeseenMove(False, end)
        undo = self._shorten(index)
        more = gap.use.own_bytes - gap.use.nbytes - self._transient.get(end, 0)
        if more > 0:
            self.excess[self._curve.find_slot(end)] += more
        if _count_over(self.excess) < over:
            self.seconds += gap.use.own_seconds
            self._transient[end] = self._transient.get(end, 0) + max(0, more)
            return True
        self.excess = saved
        del self.roles[gap.use.place], self._covers[index]
        for other, before, cover, role in reversed(undo):
            self.ends[other] = before
            if cover is not None and role is not None:
                self._covers[other], self.roles[self._gaps[other].use.place] = cover, role
        return False

    def _shorten(self, index: int) -> list[tuple[int, int, tuple[int, int] | None, ForeseenMove | None]]:
        """Limit the absence of a storage's leaves, which are needed when it is; return previous values, for undo."""
        undo: list[tuple[int, int, tuple[int, int] | None, ForeseenMove | None]] = []
        stack = [index]
        while stack:
            found = stack.pop()
            end = self.ends[found]
            for leaf in self._gaps[found].use.leaves:
                other = self._place.get(leaf)
                if other is None or not self._gaps[other].begin < end < self.ends[other]:
                    continue
                use = self._gaps[other].use
                cover, role = self._covers.get(other), self.roles.get(use.place)
                undo.append((other, self.ends[other], cover, role))
                self.ends[other] = end
                if cover is None or role is None:
                    continue
                last = min(cover[1], self._curve.find_cover(self._gaps[other].begin, end)[1])
                self.excess[last : cover[1]] += use.nbytes
                self._covers[other] = cover[0], max(cover[0], last)
                self.roles[use.place] = ForeseenMove(role.is_copied, min(role.back, end))
                if not role.is_copied:
                    stack.append(other)
        return undo


def _count_over(excess: Curve) -> float:
    return float(np.maximum(excess, 0).sum())
