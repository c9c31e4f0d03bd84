"""Timetable of one lane of a link: the intervals in use, and where a copy still fits.

taken     |####|      |#######|        |###|
earliest         ^ first fit at or after this time
latest                           last fit that ends by this time ^
"""

from __future__ import annotations

import bisect


class LinkTimetable:
    """Disjoint intervals of time."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def earliest(self, begin: float, seconds: float) -> float:
        """Return the first time, at or after `begin`, at which `seconds` are free."""
        index = bisect.bisect_right(self._ends, begin)
        while index < len(self._begins) and self._begins[index] < begin + seconds:
            begin = max(begin, self._ends[index])
            index += 1
        return begin

    def latest(self, end: float, seconds: float) -> float:
        """Return the last time at which a copy of `seconds` can begin and end by `end`; it may be negative."""
        index = bisect.bisect_left(self._begins, end) - 1
        while index >= 0 and self._ends[index] > end - seconds:
            end = min(end, self._begins[index])
            index -= 1
        return end - seconds

    def take(self, begin: float, seconds: float) -> None:
        """Reserve an interval that is free."""
        index = bisect.bisect_left(self._begins, begin)
        end = begin + seconds
        # Merge adjacent intervals, so that a search does not slow down on a busy lane.
        if index < len(self._begins) and self._begins[index] == end:
            end = self._ends[index]
            del self._begins[index], self._ends[index]
        if index and self._ends[index - 1] == begin:
            self._ends[index - 1] = end
            return
        self._begins.insert(index, begin)
        self._ends.insert(index, end)
