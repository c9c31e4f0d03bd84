"""Expected seconds of planning a step: by the search, and quickly."""

from __future__ import annotations

import contextlib
import enum
import math
import time
from collections.abc import Iterator

from elbowroom.ir.plan import Plan

SEARCH = "auto"
"""The default strategy."""

QUICK = "tensile"
"""Strategy for a kind of step whose steps have not lost as much time as the search takes."""

FEW_STEPS = 10
"""Steps that take as long as a search which is worth its time at once."""

QUICK_SHARE = 0.01
"""Share of the search's time that the quick strategy is expected to take, until both have been measured."""


class Effort(enum.Enum):
    """Time that a room's default strategy may take to plan a step."""

    QUICK = enum.auto()
    """The quick strategy plans, if it finds a plan."""
    WORTHWHILE = enum.auto()
    """The quick strategy plans, if the search is expected to take longer than a few steps."""
    SEARCH = enum.auto()


class PlanningTimes:
    """Seconds that the last plan of each strategy took. Plans of other kinds of step are expected to take as long.

    Args:
        strategy: of the room.
    """

    def __init__(self, strategy: str) -> None:
        self._strategy = strategy
        self._seconds: dict[str, float] = {}

    def is_quick(self, plan: Plan) -> bool:
        """Return True if the room's strategy may find a better plan."""
        return self._strategy == SEARCH and plan.strategy == QUICK

    def is_search_short(self, step_seconds: float) -> bool:
        """Return True if a search is expected to take no longer than a few steps.

        Args:
            step_seconds: of such a step.
        """
        return self.search_seconds <= FEW_STEPS * step_seconds

    def expect(self, plan: Plan) -> float:
        """Return the expected seconds of another plan by the strategy of a plan; 0 if it made none here."""
        return self._seconds.get(plan.strategy, 0.0)

    @contextlib.contextmanager
    def measure(self, strategy: str) -> Iterator[None]:
        """Return a context in which a strategy makes a plan."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[strategy] = time.perf_counter() - begin

    @property
    def search_seconds(self) -> float:
        """Expected seconds of a plan by the room's strategy; infinite if nothing was planned yet."""
        known = self._seconds.get(self._strategy)
        return self._seconds.get(QUICK, math.inf) / QUICK_SHARE if known is None else known

    @property
    def quick_seconds(self) -> float:
        """Expected seconds of the quickest plan of the room; 0 if nothing was planned yet."""
        share = QUICK_SHARE if self._strategy == SEARCH else 1.0
        known = self._seconds.get(QUICK)
        return share * self._seconds.get(self._strategy, 0.0) if known is None else known
