"""From a first layout down to the smallest that is found: `searching`, at one capacity after the other.

    arena of the first layout   ------
                                  --    rungs, a step below the best each: a step that was found is doubled for the
                                  --    next one, a step that was not is halved, and begins anew after the smallest
    the bound, or what is refuted ----  tried as often as all rungs together; if it is found, nothing is smaller

The same search takes a tenth of a second in one order and a year in another. So it is given up soon, and begun again
in an order that is a little different, with short and long limits mixed. Limits are counted in work and not in
seconds, and chance has a fixed seed: the same buffers have the same layout everywhere.

Where there are many buffers, the large ones are searched, and the small ones put into what they leave.

Source: Moffitt, "MiniMalloc", ASPLOS 2023 (orders by turns). Orders changed by chance, rungs, small ones: inferred.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from elbowroom.layout.greedy import fit_in_order
from elbowroom.layout.instance import Instance, select
from elbowroom.layout.orders import find_areas, find_durations, find_pressures, order_by
from elbowroom.layout.search import REFUTED, SOLVED, UNPROVEN, search_offsets
from elbowroom.layout.search_state import WORK, SearchState, make_search_state, set_order

Array = Any

LIMIT, LIMIT_PER_PAIR = 1 << 22, 1 << 8
"""Work of a short trial: to place everything once, without a step back, takes up to 150 a pair that overlaps."""

MOST = 5000
"""Up to so many buffers are searched at once: a desk for more would take half a second and some hundred MB."""

FIT_PER_BUFFER = 1500
"""Work of placing one buffer after the other, in units of the search."""

ANY = 1 << 61
"""A capacity that is never too small."""

SPREAD = 0.1
"""How much chance, or what has clashed, changes the figures that buffers are ordered by."""

FEW = 64
"""Of so few buffers every other trial is one that proves: it often comes to its end."""

MEMORY = 0.9
"""How much of what has clashed counts in the order after the next: about ten orders are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class BestLayout:
    """The best so far.

    Attributes:
        offsets: of every buffer.
        arena_bytes: what they take.
        refuted_bytes: no layout takes so few or fewer.
        work: what it took, in units of `searching`.
    """

    offsets: Array
    arena_bytes: int
    refuted_bytes: int
    work: int = 0

    def keep(self, offsets: Array, nbytes: Array) -> None:
        """Take other offsets if they are better."""
        arena = int((offsets + nbytes).max(initial=0))
        if arena < self.arena_bytes:
            self.offsets, self.arena_bytes = offsets.copy(), arena


class CapacitySearch:
    """Searches one instance at many capacities.

    Args:
        found: the first layout; made better in place.
    """

    def __init__(self, instance: Instance, found: BestLayout) -> None:
        self._instance, self.found = instance, found
        self._grain = find_grain(instance)
        lowest = max(instance.bound_bytes, found.refuted_bytes + 1)
        found.refuted_bytes = (-(-lowest // self._grain) - 1) * self._grain

    @property
    def is_done(self) -> bool:
        """Whether the best is proven to be so."""
        return self.found.arena_bytes <= self.found.refuted_bytes + self._grain

    def climb(self, most_work: int) -> None:
        """Go on until the smallest is proven or the work is done."""
        if self.is_done:
            return
        found = self.found
        grain = self._grain
        state = make_search_state(self._instance)
        shortest = LIMIT + LIMIT_PER_PAIR * len(state.near)
        step = max((found.arena_bytes - found.refuted_bytes) // 2 // grain, 1)
        orders, long_first = list_orders(self._instance, state), list_long_first(self._instance)
        for trial in itertools.count(1):
            set_order(state, next(orders), is_local=trial % 2 == 0)
            may_jump = len(state.low) > FEW or trial % 2 == 0
            limit = min(shortest * find_luby(trial), most_work - found.work)
            self._try(state, found.refuted_bytes + grain, limit, may_jump)
            rungs = (found.arena_bytes - found.refuted_bytes) // grain - 1
            if rungs > 1:
                step = min(step, rungs - 1)
                set_order(state, next(long_first), is_local=trial % 2 == 0)
                limit = min(shortest, most_work - found.work)
                verdict = self._try(state, found.arena_bytes - step * grain, limit, may_jump)
                step = 2 * step if verdict == SOLVED else step // 2 or rungs // 2
            if self.is_done or found.work >= most_work:
                return

    def _try(self, state: SearchState, capacity: int, limit: int, may_jump: bool) -> int:
        """One order at one capacity; again step by step where it came to an end that proves nothing."""
        verdict = search_offsets(state, capacity, limit, may_jump)
        self.found.work += int(state.tally[WORK])
        if verdict == UNPROVEN:
            verdict = search_offsets(state, capacity, limit, False)
            self.found.work += int(state.tally[WORK])
        if verdict == SOLVED:
            self.found.keep(state.blocks["offset"], self._instance.nbytes)
        if verdict == REFUTED:
            self.found.refuted_bytes = max(self.found.refuted_bytes, capacity)
        return verdict


def list_orders(instance: Instance, state: SearchState) -> Iterator[Array]:
    """Orders to search in where there is no room to spare, without end: what has clashed comes first in the end.

    Clashes are those of the searches on the desk since the order before, and count the less the longer they are past.
    """
    areas = find_areas(instance)
    durations = find_durations(instance)
    pressures = find_pressures(instance)
    lengths, nbytes = instance.lengths, instance.nbytes
    for keys in ((pressures, durations, areas), (pressures, lengths, nbytes), (pressures, areas)):
        yield order_by(instance, *keys)
        yield order_by(instance, *keys)
    weights, chance = np.zeros(len(areas)), np.random.default_rng(0)
    for trial in itertools.count():
        clashes = state.blocks["clashes"]
        weights = weights * MEMORY + clashes / max(clashes.sum(), 1)
        clashes[:] = 0
        changed = (durations, areas, lengths, nbytes)[trial % 4] * _shake(chance, len(weights), SPREAD)
        if trial % 4 < 2:
            yield order_by(instance, weights * _shake(chance, len(weights), 1), pressures, changed)
        else:
            yield order_by(instance, pressures * (1 + SPREAD * weights / max(weights.mean(), 1e-12)), changed)


def list_long_first(instance: Instance) -> Iterator[Array]:
    """Orders where there is room to spare: what is there for long comes first, since the rest fits anywhere."""
    areas = find_areas(instance)
    durations = find_durations(instance)
    pressures = find_pressures(instance)
    chance, spread = np.random.default_rng(0), 0.0
    while True:
        for keys in ((durations, areas), (instance.lengths, pressures)):
            for changed in (0, 1):
                figures = list(keys)
                figures[changed] = keys[changed] * _shake(chance, len(areas), spread)
                yield order_by(instance, *figures)
        spread = SPREAD


def _shake(chance: np.random.Generator, count: int, spread: float) -> Array:
    """Factors around 1."""
    return 1 + spread * (chance.random(count) - 0.5)


def find_luby(trial: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, 1, ...: how much longer than the shortest the trials of a search are best.

    Source: Luby, Sinclair, Zuckerman, "Optimal Speedup of Las Vegas Algorithms", 1993.
    """
    while True:
        length = trial.bit_length()
        if trial == (1 << length) - 1:
            return 1 << (length - 1)
        trial -= (1 << (length - 1)) - 1


def search_large(instance: Instance, found: BestLayout, most_work: int) -> None:
    """Search the large buffers, fewer of them from time to time, and put the small ones into what they leave."""
    by_size = order_by(instance, instance.nbytes)
    for count in (MOST, MOST // 2, MOST // 4):
        large, before = by_size[:count], np.full(count, -1)
        part = select(instance, large)
        state = make_search_state(part)
        limit = LIMIT + count * count + LIMIT_PER_PAIR * len(state.near)
        for trial, order in enumerate(itertools.islice(list_orders(part, state), 4)):
            set_order(state, order, is_local=trial % 2 == 1)
            for capacity in (ANY, instance.bound_bytes):  # as it comes, and as if it had to
                if found.arena_bytes <= instance.bound_bytes or found.work >= most_work:
                    return
                verdict = search_offsets(state, capacity, min(most_work - found.work, limit), True)
                found.work += int(state.tally[WORK])
                offsets = state.blocks["offset"].copy()
                if verdict == SOLVED and not np.array_equal(offsets, before):
                    before, fixed = offsets, np.full(len(by_size), -1)
                    fixed[large] = offsets
                    found.keep(fit_in_order(instance, by_size, fixed=fixed), instance.nbytes)
                    found.work += FIT_PER_BUFFER * len(by_size)


def find_grain(instance: Instance) -> int:
    """The smallest arena is a multiple of this: what lies upon each other adds up."""
    if (instance.pinned >= 0).any():
        return 1
    return math.gcd(*map(int, np.unique(instance.nbytes)), *map(int, np.unique(instance.alignment))) or 1
