"""Remembers within which budgets steps have run that no plan fits."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace


class UnplannedSteps:
    """Steps of a room that have run without a plan, in slices if need be.

    Args:
        tell_apart: returns what tells kinds of step apart.

    Attributes:
        latest: trace and costs of the latest one, and the budget within which it ran; None if there is none.
    """

    def __init__(self, tell_apart: Callable[[Trace], Hashable]) -> None:
        self._tell_apart = tell_apart
        self.latest: tuple[Trace, Costs, int] | None = None
        self._least: dict[int, tuple[int, int]] = {}  # by kind: the smallest budget, and what was held before the step

    def record(self, trace: Trace, costs: Costs, budget_bytes: int) -> None:
        """Record that a step has run within a budget."""
        kind = hash(self._tell_apart(trace))
        self.latest = trace, costs, budget_bytes
        if kind not in self._least or budget_bytes <= self._least[kind][0]:
            held_bytes = sum(each.nbytes for each in trace.storages if each.created < 0)
            self._least[kind] = budget_bytes, held_bytes

    def have_run(self, trace: Trace, budget_bytes: int, held_bytes: int) -> bool:
        """Tell whether a step of this kind has run within this budget or a smaller one, beside as many bytes.

        Args:
            held_bytes: of all that exists before the step, model state that is away included.
        """
        least_bytes, most_held_bytes = self._least.get(hash(self._tell_apart(trace)), (budget_bytes + 1, 0))
        return least_bytes <= budget_bytes and held_bytes <= most_held_bytes
