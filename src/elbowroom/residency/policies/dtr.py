"""What is cheapest to compute again, for its bytes and for how long it has been idle, is dropped.

Source: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, its score over equivalence classes. Inferred: neighbours are what a storage is computed
from, of what autograd has saved; what computes it from there counts as its own cost. Ours: what cannot be computed
again is offloaded, once nothing else is left.
"""

from __future__ import annotations

import math

from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.context import PolicyContext, list_leaves, replay_seconds
from elbowroom.residency.evicted_sets import EvictedSets
from elbowroom.residency.online import Online


class Policy(Online):
    """(own cost + that of the sets of dropped storages it touches) / (bytes x idle seconds)."""

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        super().__init__(context, history)
        self._classes = EvictedSets()
        self._costs: dict[int, float] = {}  # of what is dropped

    def rate(self, storage: int) -> float:
        context = self.context
        cost = replay_seconds(context, storage)
        if cost < math.inf:
            roots = {self._classes.find(each) for each in list_leaves(context, storage) if each in self._costs}
            cost += sum(map(self._classes.cost, roots))
        weight = context.nbytes(storage) * self.idle_seconds(storage)
        return cost / weight if weight > 0 else math.inf

    def drops(self, storage: int) -> bool:
        return True

    def left(self, storage: int, is_dropped: bool) -> None:
        if is_dropped:
            cost = replay_seconds(self.context, storage)
            self._classes.add(
                storage, cost, [each for each in list_leaves(self.context, storage) if each in self._costs]
            )
            self._costs[storage] = cost

    def came(self, storage: int) -> None:
        if storage in self._costs:
            self._classes.take(storage, self._costs.pop(storage))
