"""Plans for several budgets at once, of which none is worse than it need be.

Searches for each budget on its own may find something better for a smaller budget than for a larger one. Here each
budget gets the best of all that was found and fits. So a larger budget never gives a slower plan, and a smaller one
never a higher peak.
"""

from __future__ import annotations

from collections.abc import Sequence

Result = tuple[int, float]
"""Peak bytes and step seconds."""


def choose(results: Sequence[Result | None], budgets: Sequence[int]) -> list[int | None]:
    """For each budget the place of the fastest result within it, of equals that with the lowest peak; None: of none."""
    order = sorted((result[1], result[0], place) for place, result in enumerate(results) if result is not None)
    return [next((place for _, peak, place in order if peak <= budget), None) for budget in budgets]
