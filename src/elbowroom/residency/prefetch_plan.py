"""From what a step did, what shall leave in the next one like it: copied in the shadow of the ops, or computed again.

    bytes that would be there           .-''''-.
    budget  - - - - - - - - - - - - - -/- - - - \\- - -   what is above it has to be away
    copies out                      [a][b][c]             one after the other, as soon as each is saved
    copies back                                [c][b][a]  one after the other, as late as will do

A copy costs nothing where it is out before its room is needed and back before it is needed itself. What can be
computed again for few seconds a byte is dropped instead; where the line between the two is drawn is tried out.

Source: choosing by the pattern of accesses of a first, measured iteration: X. Peng et al., "Capuchin", ASPLOS 2020.
Ours: lanes with a backlog, and the room that a step takes as a curve over it.
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
"""The curve has so many points at most."""

WEIGHED = 1024
"""Uses that are thought about: those with the most bytes for the longest."""

LINES = 8
"""Between what is dropped and what is copied, tried."""

MENDED, MOST_MENDED = 3, 128
"""Drafts that are mended, those that lack least; and what leaves in the course of it."""

PACES = (1.0, 1.2, 1.5, 2.0, 3.0)
"""Where copies do not suffice: how much slower the step may become for their sake, tried."""


class ForeseenMove(NamedTuple):
    """What is foreseen for one thing that is saved.

    Attributes:
        is_copied: else it is dropped.
        back: the event at which the copy back begins.
    """

    is_copied: bool
    back: int


@dataclasses.dataclass(slots=True)
class _Gap:
    use: AccessPattern
    begin: int  # the events that it lies between
    end: int
    rate: float  # seconds a byte to compute it again


def plan_prefetch(
    record: StepAccesses, budget_bytes: int, move_seconds: Callable[[int], tuple[float, float]]
) -> Mapping[int, ForeseenMove]:
    """What leaves in a step like the one on record, by the place of its first save.

    Args:
        move_seconds: bytes to the seconds of a copy out, and of one back.

    Cost: of `LINES` walks over at most `WEIGHED` uses, however long the step.
    """
    if not record.was_tight:
        return {}
    foresight = _PrefetchPlanner(record, budget_bytes, move_seconds)
    return foresight.find() if foresight.gaps else {}


class _Shortage:
    """The room that is missing, as a curve: from each event to the next, and at each event, where replays are."""

    def __init__(self, record: StepAccesses, budget_bytes: int) -> None:
        self._positions = 2 * len(record.seconds) + 1  # 2 e before event e, 2 e + 1 at it
        self._slots = min(SLOTS, self._positions)
        bytes_ = np.zeros(self._positions)
        bytes_[0::2], bytes_[1::2] = record.demand_bytes, record.level_bytes
        self.excess = np.full(self._slots, -math.inf)
        slots = np.arange(self._positions) * self._slots // self._positions
        np.maximum.at(self.excess, slots, bytes_ - budget_bytes)

    def find_slot(self, event: int) -> int:
        """Where an event is."""
        return (2 * event + 1) * self._slots // self._positions

    def find_slots(self, events: list[int]) -> npt.NDArray[np.int64]:
        """Where each of these is."""
        return (2 * np.array(events, np.int64) + 1) * self._slots // self._positions

    def find_event(self, slot: int) -> int:
        """The other way around."""
        return slot * self._positions // self._slots // 2

    def find_cover(self, begin: int, end: int) -> tuple[int, int]:
        """The part that lies between two events."""
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
            for draft in sorted(drafts, key=self._find_cost)[:MENDED]:
                self._mend(draft, pace)
                cost = self._walk(draft)
                if cost < best[0]:
                    best = cost, draft.roles
                    is_better = True
            if is_enough or not is_better:
                break
        return best[1]

    def _find_cost(self, draft: _Draft) -> float:
        """Seconds, and more of them for what is still too much."""
        return draft.seconds + 2 * sum(self._move(max(0, int(draft.excess.max()))))

    def _walk(self, draft: _Draft) -> float:
        """Seconds that a step would take with this beyond those of its ops, and for what is still too much."""
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
        """The longest time between two uses, the second of which is a need."""
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
        """Drop what is below the line, as far as must be; of the rest, copy what costs nothing."""
        ends = [gap.end for gap in self.gaps]
        dropped = sorted((gap.rate, index) for index, gap in enumerate(self.gaps) if gap.rate <= line)
        for is_first in (True, False):  # what is dropped says until when the rest may be away
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

    def _mend(self, draft: _Draft, pace: float) -> None:
        """Where it is worst, let leave what costs least, be it that the step waits for its copy."""
        nbytes = np.array([gap.use.nbytes for gap in self.gaps], float)
        own = np.array([gap.use.own_seconds for gap in self.gaps], float)
        out, back = np.array([self._move(gap.use.nbytes) for gap in self.gaps]).reshape(-1, 2).T
        first = np.array([self._curve.find_cover(gap.begin, gap.end)[0] for gap in self.gaps])
        is_out = np.array([gap.use.place in draft.roles for gap in self.gaps])
        for _ in range(MOST_MENDED):
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
    """What leaves, so far.

    Attributes:
        excess: bytes that are too many, as a curve.
        ends: when each is needed, be it for what is computed from it.
        seconds: of replays, and of waiting.
        out_free: when the last copy is out.
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
        self._transient: dict[int, int] = {}  # by event, what replays take beside what they bring back

    def copy(self, index: int, begin: int, end: int) -> bool:
        """Have it away from one event to another, if that is of use."""
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
        """Have it away until it is needed, if that is of more use than it does harm to what it is computed from."""
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
        """What it is computed from is needed no later than it is; returns what was before."""
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
