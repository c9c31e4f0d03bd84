"""The best plan for each of several budgets, so that more memory never gives a slower plan.

Separate searches may find a better plan for a smaller budget than for a larger one. Here each budget gets the best of
all plans found that fit. So a larger budget never gives a slower plan, and a smaller one never a higher peak.
"""

from __future__ import annotations

from collections.abc import Sequence

Result = tuple[int, float]
"""Peak bytes and step seconds."""


def choose(results: Sequence[Result | None], budgets: Sequence[int]) -> list[int | None]:
    """Return, for each budget, the index of the fastest result within it (ties: of the lowest peak), or None."""
    order = sorted((result[1], result[0], place) for place, result in enumerate(results) if result is not None)
    return [next((place for _, peak, place in order if peak <= budget), None) for budget in budgets]
