"""Neighbours leave together: the blocks side by side in memory that make enough room at the least cost.

    addresses   |a |b |c  |held|d|e   |f |        room for two of these: b and c, or d and e, or e and f; never c and d

A block costs min(recompute, swap) / idle seconds. A window is blocks with nothing but a sliver between them, and wide
enough for what is asked for; of those that begin at a sample of places the cheapest leaves. Where addresses are not
known, or no window is wide enough, what leaves is rated as in `delta`: min(recompute, swap) / (bytes x idle seconds).

Source: J. Zhang, S. Ma, P. Liu, J. Yuan, "Coop: Memory is not a Commodity", NeurIPS 2023 (a window that slides over the
addresses). Inferred: what a block costs. Left out: where blocks are put is the allocator's, so that what is cheap to
compute is not kept at one end of memory; it is told apart by its cost alone. Ours: the cheaper manner, not only drops.
"""

from __future__ import annotations

import bisect
import math

from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.context import PolicyContext, replay_seconds, swap_seconds
from elbowroom.residency.machine import Intent
from elbowroom.residency.online import Online

STARTS = 32
"""Windows rated, if there are so many blocks."""

WIDEST = 64
"""Blocks in a window, at most."""

SLIVER_BYTES = 1 << 10
"""Between neighbours, at most: what an allocator rounds up to, or writes beside a block."""


class Policy(Online):
    """The cheapest window; else min(recompute, swap) / (bytes x idle seconds)."""

    uses_addresses = True

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        super().__init__(context, history)
        self._blocks: list[tuple[int, int]] = []  # (address, storage) of what is in the pool, in order
        self._addresses: dict[int, int] = {}
        self._new: list[int] = []  # may not be where it will be yet
        self._window: list[int] = []

    def rate(self, storage: int) -> float:
        weight = self.context.nbytes(storage) * self.idle_seconds(storage)
        return self._cost(storage) / weight if weight > 0 else math.inf

    def _cost(self, storage: int) -> float:
        return min(replay_seconds(self.context, storage), swap_seconds(self.context, storage))

    # -- where blocks are -----------------------------------------------------------------------------------------

    def _put(self, storage: int) -> None:
        super()._put(storage)
        self._new.append(storage)

    def _take(self, storage: int) -> None:
        super()._take(storage)
        address = self._addresses.pop(storage, None)
        if address is not None:
            del self._blocks[bisect.bisect_left(self._blocks, (address, storage))]

    def _find_new(self) -> None:
        are_many = 8 * len(self._new) > len(self._blocks)
        for storage in self._new:
            if storage not in self._here or storage in self._addresses:
                continue
            address = self.context.address(storage)
            if address is None:
                continue
            self._addresses[storage] = address
            if are_many:
                self._blocks.append((address, storage))
            else:
                bisect.insort(self._blocks, (address, storage))
        self._new.clear()
        if are_many:
            self._blocks.sort()

    # -- windows --------------------------------------------------------------------------------------------------

    def _relieve(self, nbytes: int) -> list[Intent]:
        self._find_new()
        self._window = self._find_window(nbytes)
        return super()._relieve(nbytes)

    def _pick(self) -> int | None:
        while self._window:
            storage = self._window.pop()
            if storage in self._here:
                return storage
        return super()._pick()

    def _find_window(self, nbytes: int) -> list[int]:
        """The cheapest that is wide enough; nothing if there is none."""
        count = len(self._blocks)
        starts = range(count) if count <= STARTS else self._here.draw_numbers(count, STARTS)
        least: tuple[float, list[int]] = (math.inf, [])
        for start in starts:
            found = self._widen(start, nbytes, least[0])
            if found is not None:
                least = found
        return least[1]

    def _widen(self, start: int, nbytes: int, least: float) -> tuple[float, list[int]] | None:
        """The window that begins there, and what it costs; None if it is too narrow or costs more than `least`."""
        cost = 0.0
        wide = 0
        window = list[int]()
        end = self._blocks[start][0]
        for address, storage in self._blocks[start : start + WIDEST]:
            idle = self.idle_seconds(storage)
            if address - end > SLIVER_BYTES or idle <= 0 or not self.context.may_leave(storage):
                return None
            cost += self._cost(storage) / idle
            if cost >= least:
                return None
            wide += self.context.nbytes(storage)
            end = address + self.context.nbytes(storage)
            window.append(storage)
            if wide >= nbytes:
                return cost, window
        return None
