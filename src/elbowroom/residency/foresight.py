"""From what a step did, what shall leave in the next one like it: copied in the shadow of the ops, or computed again.

    bytes that would be there           .-''''-.
    budget  - - - - - - - - - - - - - -/- - - - \\- - -   what is above it has to be away
    copies out                      [a][b][c]             one after the other, as soon as each is saved
    copies back                                [c][b][a]  one after the other, as late as will do

A copy costs nothing where it is out before its room is needed and back before it is needed itself. What can be
computed again for few seconds a byte is dropped instead; where the line between the two is drawn is tried out.

Source: choosing by the pattern of accesses of a first, measured iteration: X. Peng et al., "Capuchin", ASPLOS 2020. Ours:
lanes with a backlog, and the room that a step takes as a curve over it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from elbowroom.residency.habits import Record, Use

INTERVALS = 1024
"""The curve has so many points at most."""

WEIGHED = 2048
"""Uses that are thought about: those with the most bytes for the longest."""

LINES = 16
"""Between what is dropped and what is copied, tried."""


@dataclasses.dataclass(frozen=True, slots=True)
class Role:
    """What is foreseen for one thing that is saved.

    Attributes:
        is_copied: else it is dropped.
        back: the event at which the copy back begins.
    """

    is_copied: bool
    back: int


@dataclasses.dataclass(slots=True)
class _Gap:
    use: Use
    begin: int  # the events that it lies between
    end: int
    rate: float  # seconds a byte to compute it again


def foresee(
    record: Record, budget_bytes: int, move_seconds: Callable[[int], tuple[float, float]]
) -> Mapping[int, Role]:
    """What leaves in a step like the one on record, by the place of its first save.

    Args:
        move_seconds: bytes to the seconds of a copy out, and of one back.

    Cost: of `LINES` walks over at most `WEIGHED` uses, however long the step.
    """
    if not record.was_tight:
        return {}
    return _Foresight(record, budget_bytes, move_seconds).find()


class _Foresight:
    def __init__(
        self, record: Record, budget_bytes: int, move_seconds: Callable[[int], tuple[float, float]]
    ) -> None:
        self._move = move_seconds
        self._seconds = np.asarray(record.seconds)
        self._events = len(record.seconds)
        self._intervals = min(INTERVALS, self._events + 1)
        self._excess = np.full(self._intervals, -math.inf)
        where = np.arange(self._events + 1) * self._intervals // (self._events + 1)
        np.maximum.at(self._excess, where, np.asarray(record.demand_bytes, float) - budget_bytes)
        gaps = [gap for use in dict.fromkeys(record.saves) if (gap := self._find_gap(use)) is not None]
        weighed = sorted(gaps, key=lambda gap: -gap.use.nbytes * (gap.end - gap.begin))[:WEIGHED]
        self._gaps = sorted(weighed, key=lambda gap: gap.use.place)
        self._place = {gap.use.place: index for index, gap in enumerate(self._gaps)}

    def find(self) -> Mapping[int, Role]:
        rates = sorted({gap.rate for gap in self._gaps if gap.rate < math.inf})
        step = max(1, len(rates) // LINES)
        lines = [-1.0, *rates[step - 1 :: step], *rates[-1:]]
        best: tuple[float, Mapping[int, Role]] = (math.inf, {})
        for line in lines:
            cost, roles = self._try(line)
            if cost < best[0]:
                best = cost, roles
        return best[1]

    def _find_gap(self, use: Use) -> _Gap | None:
        """The longest time between two uses, the second of which is a need."""
        needs = set(use.needs)
        found: tuple[float, int, int] | None = None
        for begin, end in zip(use.events, use.events[1:], strict=False):
            if end in needs:
                length = float(self._seconds[end] - self._seconds[begin])
                if found is None or length > found[0]:
                    found = length, begin, end
        if found is None or not use.is_known:
            return None
        begin = max(found[1], use.free)
        if begin >= found[2]:
            return None
        return _Gap(use, begin, found[2], use.own_seconds / max(1, use.nbytes))

    def _slot(self, interval: int) -> int:
        return interval * self._intervals // (self._events + 1)

    def _find_ends(self, line: float) -> list[int]:
        """When each is needed, be it for what is computed from it."""
        ends = [gap.end for gap in self._gaps]
        for index in range(len(ends) - 1, -1, -1):
            gap = self._gaps[index]
            if gap.rate > line:
                continue
            for leaf in gap.use.leaves:
                other = self._place.get(leaf)
                if other is not None and gap.begin < ends[index] < ends[other] and ends[index] > self._gaps[other].begin:
                    ends[other] = ends[index]
        return ends

    def _try(self, line: float) -> tuple[float, Mapping[int, Role]]:
        """Drop what is below the line, as far as must be; copy of the rest what costs nothing. Seconds and roles."""
        excess, roles = self._excess.copy(), dict[int, Role]()
        ends = self._find_ends(line)
        seconds = self._seconds
        out_free, back_free = 0.0, math.inf
        for index, gap in enumerate(self._gaps):
            if gap.rate <= line:
                continue
            out, back = self._move(gap.use.nbytes)
            done = max(out_free, seconds[gap.use.events[0]]) + out
            start = min(back_free, seconds[ends[index]]) - back
            if start <= done:
                continue
            first = max(gap.begin, int(np.searchsorted(seconds, done)))
            last = int(np.searchsorted(seconds, start, side="right")) - 1
            covered = excess[self._slot(first) + 1 : self._slot(last + 1)]
            if last <= first or not covered.size or covered.max() <= 0:
                continue
            covered -= gap.use.nbytes
            out_free, back_free = done, start
            roles[gap.use.place] = Role(True, last)
        cost = 0.0
        dropped = sorted((gap.rate, index) for index, gap in enumerate(self._gaps) if gap.rate <= line)
        for _, index in dropped:
            if excess.max() <= 0:
                break
            gap = self._gaps[index]
            covered = excess[self._slot(gap.begin) + 1 : self._slot(ends[index] + 1)]
            if covered.size and covered.max() > 0:
                covered -= gap.use.nbytes
                roles[gap.use.place] = Role(False, ends[index])
                cost += gap.use.own_seconds
        left = max(0, int(excess.max()))
        return cost + 2 * sum(self._move(left)), roles
