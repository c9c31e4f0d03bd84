"""Expected seconds of planning a step: quickly, with little effort, and by the whole search."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator

from elbowroom.ir.plan import Plan

SEARCH = "auto"
"""The default strategy."""

BRIEF = "auto:effort=0.1"
"""The same with little effort. Near the smallest budget its steps may take nearly twice as long, else hardly longer."""

QUICK = "tensile"
"""Strategy for a kind of step whose steps have not lost as much time as a brief search takes."""

LEVELS = QUICK, BRIEF, SEARCH
"""Strategies that make the plans of the default one, each better than the one before."""

SECONDS = 1.0, 10.0, 200.0
"""Expected seconds of the levels, as multiples of the first one's, until they have been measured."""

FEW_STEPS = 10
"""Steps that take as long as a search which is worth its time at once."""


def find_level(plan: Plan) -> str:
    """Return the level that has made a plan; the first one if another strategy has."""
    return plan.strategy if plan.strategy in LEVELS else QUICK


class PlanningTimes:
    """Seconds that the last plan of each strategy took. Plans of other kinds of step are expected to take as long.

    Args:
        strategy: of the room.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._seconds: dict[str, float] = {}

    def find_better(self, plan: Plan) -> str | None:
        """Return the level that may find a better plan; None if there is none."""
        is_level = self._strategy == SEARCH and plan.strategy in LEVELS[:-1]
        return LEVELS[LEVELS.index(plan.strategy) + 1] if is_level else None

    @contextlib.contextmanager
    def measure(self, strategy: str) -> Iterator[None]:
        """Return a context in which a strategy makes a plan."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[strategy] = time.perf_counter() - begin

    def is_worth_its_time(self, strategy: str, step_seconds: float) -> bool:
        """Return True if a plan of a level is expected to take no longer than a few steps.

        Args:
            step_seconds: of such a step.
        """
        return self.expect(strategy) <= FEW_STEPS * step_seconds

    @property
    def search_seconds(self) -> float:
        """Expected seconds of a plan that is better than a quick one; infinite if nothing was planned yet."""
        return self.expect(BRIEF if self._strategy == SEARCH else self._strategy)

    @property
    def quick_seconds(self) -> float:
        """Expected seconds of the quickest plan of the room; 0 if nothing was planned yet."""
        return self.expect(QUICK if self._strategy == SEARCH else self._strategy, 0.0)

    def expect(self, strategy: str, unknown: float = math.inf) -> float:
        """Return the expected seconds of a plan by a strategy, from those of the nearest level if it has made none.

        Args:
            unknown: result if nothing was planned yet.
        """
        if strategy in self._seconds or strategy not in LEVELS:
            return self._seconds.get(strategy, unknown)
        level = LEVELS.index(strategy)
        known = [each for each in range(len(LEVELS)) if LEVELS[each] in self._seconds]
        if not known:
            return unknown
        nearest = min(known, key=lambda each: abs(each - level))
        return self._seconds[LEVELS[nearest]] * SECONDS[level] / SECONDS[nearest]
