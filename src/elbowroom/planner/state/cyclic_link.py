"""Timetable of a link for copies that every step repeats."""

from __future__ import annotations

from elbowroom.ir.hardware import Link
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.state.windows import Cycle, Window

STEPS = (-1, 0, 1, 2)
"""Steps in which each copy is noted: windows lie in two steps, and copies reach into their neighbours."""


class CyclicLink:
    """The copies of chosen windows. A half-duplex link has one timetable for both directions."""

    def __init__(self, cycle: Cycle, link: Link) -> None:
        self._cycle = cycle
        self._out = LinkTimetable()
        self._back = self._out if link.half_duplex else LinkTimetable()

    def find_late(self, window: Window, begin: int, stop: int, *, is_dirty: bool) -> float:
        """Return the seconds by which a window's copies would reach into the ticks in which it has to be away."""
        begins, late = self._cycle.begins, 0.0
        if is_dirty:
            left = float(begins[window.opens + 1])
            late += max(0.0, self._out.earliest(left, window.out_seconds) + window.out_seconds - float(begins[begin]))
        if window.back_seconds:
            needed = float(begins[window.last])
            late += max(0.0, float(begins[stop]) - self._back.latest(needed, window.back_seconds))
        return late

    def take(self, window: Window, *, is_dirty: bool) -> None:
        """Note the copies of a window."""
        if is_dirty:
            left = float(self._cycle.begins[window.opens + 1])
            self._note(self._out, self._out.earliest(left, window.out_seconds), window.out_seconds)
        if window.back_seconds:
            needed = float(self._cycle.begins[window.last])
            self._note(self._back, self._back.latest(needed, window.back_seconds), window.back_seconds)

    def _note(self, lane: LinkTimetable, begin: float, seconds: float) -> None:
        begin %= self._cycle.step_seconds or 1.0
        for step in STEPS:
            at = lane.earliest(
                begin + step * self._cycle.step_seconds, seconds
            )  # itself, unless the link is overloaded
            lane.take(at, seconds)
