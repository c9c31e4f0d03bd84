"""Evicts the storage with the lowest min(recompute, swap) / (bytes x idle seconds), by the cheaper of the two.

Copies begin before the budget is reached, and offloaded storages are reloaded early, in the order in which they left,
while memory is free.

Source: Y. Tang, C. Wang, Y. Zhang, Y. Liu, X. Zhang, L. Qiao, Z. Lai, D. Li, "DELTA: Dynamically optimizing GPU memory
beyond tensor recomputation", arXiv 2203.15980, 2022 (filter, director, prefetch). The score is that of its successor in
ACM TACO 2024, as reported by others. Their public code scores by 1 / (bytes x idle seconds) and moves nothing early;
see `delta_code`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from elbowroom.residency.context import replay_seconds, swap_seconds
from elbowroom.residency.online import Online


class Policy(Online):
    """Score: min(recompute, swap) / (bytes x idle seconds)."""

    is_early = True

    def rate(self, storage: int) -> float:
        context = self.context
        cost = min(replay_seconds(context, storage), swap_seconds(context, storage))
        weight = context.nbytes(storage) * self.idle_seconds(storage)
        return cost / weight if weight > 0 else math.inf

    def list_next(self, away: Iterable[int]) -> Iterable[int]:
        return away
