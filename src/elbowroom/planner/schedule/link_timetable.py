"""A lane of a link as a timetable: which stretches of time are taken, and where there is still room.

taken     |####|      |#######|        |###|
earliest         ^ first fit from here on
latest                           last fit before there ^
"""

from __future__ import annotations

import bisect


class LinkTimetable:
    """Stretches of time that do not overlap."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def earliest(self, begin: float, seconds: float) -> float:
        """The first time, from `begin` on, at which so many seconds are free."""
        index = bisect.bisect_right(self._ends, begin)
        while index < len(self._begins) and self._begins[index] < begin + seconds:
            begin = max(begin, self._ends[index])
            index += 1
        return begin

    def latest(self, end: float, seconds: float) -> float:
        """The last time at which a stretch of so many seconds may begin that is over by `end`; it may be below 0."""
        index = bisect.bisect_left(self._begins, end) - 1
        while index >= 0 and self._ends[index] > end - seconds:
            end = min(end, self._begins[index])
            index -= 1
        return end - seconds

    def take(self, begin: float, seconds: float) -> None:
        """Occupy a stretch that is free."""
        index = bisect.bisect_left(self._begins, begin)
        end = begin + seconds
        # Neighbours become one, so that looking for room does not get slower where it is all taken.
        if index < len(self._begins) and self._begins[index] == end:
            end = self._ends[index]
            del self._begins[index], self._ends[index]
        if index and self._ends[index - 1] == begin:
            self._ends[index - 1] = end
            return
        self._begins.insert(index, begin)
        self._ends.insert(index, end)
