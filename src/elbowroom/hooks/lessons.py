"""What the ops of a step really took, held against what was expected of them, in steps that a meter counts.

Rules for what kernels allocate were fitted on a few machines; others have other kernels.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from elbowroom.hooks.estimates import Estimate, Estimates, Exact
from elbowroom.hooks.kinds import Kind
from elbowroom.hooks.meter import Meter


class Lesson:
    """One op that ran.

    Attributes:
        exact: tells it from others; None if nothing does.
        begin, end: on the clock of `time.time_ns`; the end is 0 if it was never reached.
    """

    __slots__ = ("begin", "end", "estimate", "exact")

    def __init__(self, exact: Exact | None, estimate: Estimate) -> None:
        self.exact, self.estimate = exact, estimate
        self.end, self.begin = 0, time.time_ns()


class Lessons:
    """Of one step."""

    def __init__(self, estimates: Estimates) -> None:
        self._estimates = estimates
        self._lessons: list[Lesson] = []

    def begin(self, kind: Kind, args: tuple[Any, ...], kwargs: dict[str, Any], estimate: Estimate) -> Lesson:
        """An op is about to run. It has run once the `end` of its lesson is set."""
        lesson = Lesson(self._estimates.tell_apart(kind, args, kwargs), estimate)
        self._lessons.append(lesson)
        return lesson

    def learn(self, meter: Meter) -> None:
        """The step is over, and its meter has stopped."""
        lessons = _list_lone([each for each in self._lessons if each.end])
        self._lessons.clear()
        taken = meter.count_taken([each.begin for each in lessons], [each.end for each in lessons])
        for lesson, nbytes in zip(lessons, taken, strict=False):  # nothing is counted where nobody can
            self._estimates.learn(lesson.exact, lesson.estimate, nbytes)


def _list_lone(lessons: list[Lesson]) -> list[Lesson]:
    """Those of ops that ran while no other thread ran one, whose bytes would be taken for theirs."""
    lessons.sort(key=lambda lesson: lesson.begin)
    lone, busy_until = [], 0
    for lesson, following in itertools.zip_longest(lessons, lessons[1:]):
        if lesson.begin >= busy_until and (following is None or lesson.end <= following.begin):
            lone.append(lesson)
        busy_until = max(busy_until, lesson.end)
    return lone
