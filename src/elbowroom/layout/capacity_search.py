"""Search for the smallest arena: run `search_offsets` at one trial capacity after another.

    arena of the best layout    ------
                                  --    trial capacities, `step` below the best: the step doubles after a success,
                                  --    halves after a failure, and restarts at half the range once it reaches zero
    lower bound, or refuted     ------  the smallest capacity left is tried as often; a layout there is optimal

The same search can take a tenth of a second in one branching order and a year in another. So runs are cut short and
restarted in a slightly different order, with short and long limits mixed. Limits are in units of work, not seconds, and
the random seed is fixed, so that layouts are reproducible.

With many buffers, only the large ones are searched, and the small ones are placed in the gaps.

Source: Moffitt, "MiniMalloc", ASPLOS 2023 (alternating orders). Inferred: randomized orders, trial capacities, small
buffers last.
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
"""Work limit of a short run. Placing every buffer once, without backtracking, takes up to 150 per overlapping pair."""

MOST = 5000
"""Buffers searched at once, at most: the state for more would take half a second and some hundred MB to build."""

FIT_PER_BUFFER = 1500
"""Work of greedy placement per buffer, in units of the search."""

ANY = 1 << 61
"""A capacity that is always large enough."""

SPREAD = 0.1
"""Relative change of the sort keys, at random or by conflict weights."""

FEW = 64
"""Up to so many buffers, every other run is exhaustive: it often finishes."""

MEMORY = 0.9
"""Decay of the conflict weights per order: about ten orders are remembered."""


@dataclasses.dataclass(slots=True, eq=False)
class BestLayout:
    """The best layout so far.

    Attributes:
        offsets: of every buffer.
        arena_bytes: its size.
        refuted_bytes: no layout of this size or smaller exists.
        work: work spent so far, in units of the search.
    """

    offsets: Array
    arena_bytes: int
    refuted_bytes: int
    work: int = 0

    def keep(self, offsets: Array, nbytes: Array) -> None:
        """Keep these offsets if their arena is smaller."""
        arena = int((offsets + nbytes).max(initial=0))
        if arena < self.arena_bytes:
            self.offsets, self.arena_bytes = offsets.copy(), arena


class CapacitySearch:
    """Searches one instance at many capacities.

    Args:
        found: the first layout; improved in place.
    """

    def __init__(self, instance: Instance, found: BestLayout) -> None:
        self._instance, self.found = instance, found
        self._grain = find_grain(instance)
        lowest = max(instance.bound_bytes, found.refuted_bytes + 1)
        found.refuted_bytes = (-(-lowest // self._grain) - 1) * self._grain

    @property
    def is_done(self) -> bool:
        """Tell whether the best layout is proven optimal."""
        return self.found.arena_bytes <= self.found.refuted_bytes + self._grain

    def climb(self, most_work: int) -> None:
        """Search until the best layout is proven optimal or the work limit is reached."""
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
            untried = (found.arena_bytes - found.refuted_bytes) // grain - 1
            if untried > 1:
                step = min(step, untried - 1)
                set_order(state, next(long_first), is_local=trial % 2 == 0)
                limit = min(shortest, most_work - found.work)
                verdict = self._try(state, found.arena_bytes - step * grain, limit, may_jump)
                step = 2 * step if verdict == SOLVED else step // 2 or untried // 2
            if self.is_done or found.work >= most_work:
                return

    def _try(self, state: SearchState, capacity: int, limit: int, may_jump: bool) -> int:
        """Search at one capacity; if the result is UNPROVEN, search again without jumps."""
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
    """Generate orders for tight capacities, without end. Later orders favour buffers that were often in conflict.

    Conflicts are counted in `state` since the previous order, and decay by `MEMORY` per order.
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
        changed = (durations, areas, lengths, nbytes)[trial % 4] * _perturb(chance, len(weights), SPREAD)
        if trial % 4 < 2:
            yield order_by(instance, weights * _perturb(chance, len(weights), 1), pressures, changed)
        else:
            yield order_by(instance, pressures * (1 + SPREAD * weights / max(weights.mean(), 1e-12)), changed)


def list_long_first(instance: Instance) -> Iterator[Array]:
    """Generate orders for loose capacities: long-lived buffers first, since the others fit anywhere."""
    areas = find_areas(instance)
    durations = find_durations(instance)
    pressures = find_pressures(instance)
    chance, spread = np.random.default_rng(0), 0.0
    while True:
        for keys in ((durations, areas), (instance.lengths, pressures)):
            for changed in (0, 1):
                figures = list(keys)
                figures[changed] = keys[changed] * _perturb(chance, len(areas), spread)
                yield order_by(instance, *figures)
        spread = SPREAD


def _perturb(chance: np.random.Generator, count: int, spread: float) -> Array:
    """Return random factors around 1."""
    return 1 + spread * (chance.random(count) - 0.5)


def find_luby(trial: int) -> int:
    """Return an element of the Luby sequence 1, 1, 2, 1, 1, 2, 4, 1, ...: run lengths of a restarted search.

    Source: Luby, Sinclair, Zuckerman, "Optimal Speedup of Las Vegas Algorithms", 1993.
    """
    while True:
        length = trial.bit_length()
        if trial == (1 << length) - 1:
            return 1 << (length - 1)
        trial -= (1 << (length - 1)) - 1


def search_large(instance: Instance, found: BestLayout, most_work: int) -> None:
    """Search the largest `MOST`, `MOST` / 2 and `MOST` / 4 buffers, and place the others in the gaps."""
    by_size = order_by(instance, instance.nbytes)
    for count in (MOST, MOST // 2, MOST // 4):
        large, before = by_size[:count], np.full(count, -1)
        part = select(instance, large)
        state = make_search_state(part)
        limit = LIMIT + count * count + LIMIT_PER_PAIR * len(state.near)
        for trial, order in enumerate(itertools.islice(list_orders(part, state), 4)):
            set_order(state, order, is_local=trial % 2 == 1)
            for capacity in (ANY, instance.bound_bytes):  # unconstrained, then as tight as possible
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
    """Return a number that divides the smallest arena: offsets are sums of sizes, rounded up to alignments."""
    if (instance.pinned >= 0).any():
        return 1
    return math.gcd(*map(int, np.unique(instance.nbytes)), *map(int, np.unique(instance.alignment))) or 1
