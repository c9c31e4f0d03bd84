"""Tells kinds of step apart by the shapes of the inputs of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elbowroom.hooks.input_guard import Inputs
from elbowroom.plan_cache_entry import PlanCacheEntry


class KindsByInputs:
    """Remembers the inputs of steps that were of another kind than these had told."""

    def __init__(self) -> None:
        self._ambiguous: set[Inputs] = set()

    def note_miss(self, calls: Counter[Inputs], entries: Sequence[PlanCacheEntry]) -> None:
        """Note that a step with these calls of the model was of none of the known kinds."""
        if find_told(calls, entries) is not None:
            self._ambiguous.update(calls)

    def distrust(self, calls: Counter[Inputs]) -> None:
        """Note that these calls of the model do not tell what a step needs."""
        self._ambiguous.update(calls)

    def tell_all(self, entries: Sequence[PlanCacheEntry]) -> bool:
        """Return True if no two of these kinds have an input in common with which autograd records the call."""
        known = set[Inputs]()
        for each in entries:
            trained = {inputs for inputs in each.calls if inputs.has_gradients}
            if not trained or trained & known or trained & self._ambiguous:
                return False
            known |= trained
        return True


def find_told(calls: Counter[Inputs], entries: Sequence[PlanCacheEntry]) -> PlanCacheEntry | None:
    """Return the first kind whose steps call the model like this, and perhaps further times; None if there is none."""
    return next((each for each in entries if calls <= each.calls), None) if calls else None
