"""Timetable of a link for copies that every step repeats."""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.plan import Choice, Plan
from elbowroom.planner.schedule.link_timetable import LinkTimetable
from elbowroom.planner.state.windows import Cycle, Window
from elbowroom.simulator.planned import PreparedTrace

STEPS = (-1, 0, 1, 2)
"""Steps in which each copy is noted: windows lie in two steps, and copies reach into their neighbours."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """Copies of activations: begin and duration of each, in seconds of the plain step, in order of time."""

    out: tuple[tuple[float, float], ...] = ()
    back: tuple[tuple[float, float], ...] = ()


NO_TRAFFIC = Traffic()


def list_traffic(replay: PreparedTrace, plan: Plan) -> Traffic:
    """Return the copies of activations under a plan."""
    link, begins = replay.costs.link, replay.begin_list
    sizes = replay.trace.storages
    out: list[tuple[float, float]] = []
    back: list[tuple[float, float]] = []
    copied: set[tuple[int, int]] = set()
    for decision in sorted(plan.decisions, key=lambda each: each.leave):
        if decision.choice is not Choice.OFFLOAD:
            continue
        nbytes = sizes[decision.storage].nbytes
        claim = next(each for each in replay.trace.claims[decision.storage] if each[0] <= decision.leave < each[1])
        if (decision.storage, claim[0]) not in copied:
            copied.add((decision.storage, claim[0]))
            out.append((begins[decision.leave], offload_seconds(link, nbytes)))
        back.append((begins[decision.back], reload_seconds(link, nbytes)))
    return Traffic(out=tuple(sorted(out)), back=tuple(sorted(back)))


class CyclicLink:
    """The copies of chosen windows: out as early as possible, back as late as possible.

    Args:
        out, back: timetables of the two directions; one for both if the link is half-duplex.
        traffic: copies of activations.
    """

    def __init__(self, cycle: Cycle, out: LinkTimetable, back: LinkTimetable, traffic: Traffic = NO_TRAFFIC) -> None:
        self._cycle = cycle
        self._out = out
        self._back = back
        for lane, copies in ((out, traffic.out), (back, traffic.back)):
            for begin, seconds in copies:
                self._note(lane, begin, seconds)

    def find_gone(self, window: Window, *, is_dirty: bool) -> float:
        """Return the time at which the copy out is done, or would be."""
        left = float(self._cycle.begins[window.opens + 1])
        return self._out.earliest(left, window.out_seconds) + window.out_seconds if is_dirty else left

    def find_reload(self, window: Window) -> float:
        """Return the latest time at which the copy back can begin."""
        return self._back.latest(float(self._cycle.begins[window.last]), window.back_seconds)

    def find_late(self, window: Window, begin: int, stop: int, *, is_dirty: bool) -> float:
        """Return the seconds by which a window's copies would reach into the ticks in which it has to be away."""
        begins = self._cycle.begins
        late = max(0.0, self.find_gone(window, is_dirty=is_dirty) - float(begins[begin])) if is_dirty else 0.0
        if window.back_seconds:
            late += max(0.0, float(begins[stop]) - self.find_reload(window))
        return late

    def take(self, window: Window, *, is_dirty: bool) -> None:
        """Note the copies of a window."""
        if is_dirty:
            self._note(self._out, self.find_gone(window, is_dirty=True) - window.out_seconds, window.out_seconds)
        if window.back_seconds:
            self._note(self._back, self.find_reload(window), window.back_seconds)

    def _note(self, lane: LinkTimetable, begin: float, seconds: float) -> None:
        begin %= self._cycle.step_seconds or 1.0
        for step in STEPS:
            at = lane.earliest(begin + step * self._cycle.step_seconds, seconds)  # later only if the link is overloaded
            lane.take(at, seconds)
