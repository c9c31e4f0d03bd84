"""Evicts adjacent blocks together: the contiguous window of sufficient size with the least cost.

    addresses   |a |b |c  |held|d|e   |f |        windows of two blocks: b and c, d and e, e and f; but not c and d

The cost of a block is min(recompute, swap) / idle seconds. A window is a run of blocks without gaps (beyond alignment)
that is as large as the request; the cheapest of a sample of windows is evicted. If addresses are unknown, or no window
is large enough, storages are scored as in `delta`: min(recompute, swap) / (bytes x idle seconds).

Source: J. Zhang, S. Ma, P. Liu, J. Yuan, "Coop: Memory is not a Commodity", NeurIPS 2023 (a window that slides over the
addresses). Inferred: the cost of a block. Left out: placing cheap tensors at one end of memory, since the allocator
chooses addresses. Ours: offload or drop, whichever is cheaper, instead of drops only.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator

from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.context import PolicyContext, replay_seconds, swap_seconds
from elbowroom.residency.machine import Intent
from elbowroom.residency.online import SAMPLE, Online

STARTS = 32
"""Most windows scored per eviction."""

WIDEST = 64
"""Most blocks in a window."""

SLIVER_BYTES = 1 << 10
"""Largest gap between adjacent blocks: alignment padding, or an allocator's header."""


class Policy(Online):
    """Score: cheapest window first; else min(recompute, swap) / (bytes x idle seconds)."""

    uses_addresses = True

    def __init__(self, context: PolicyContext, history: AccessHistory) -> None:
        super().__init__(context, history)
        self._blocks: list[tuple[int, int]] = []  # (address, storage) of the storages on the device, sorted
        self._addresses: dict[int, int] = {}
        self._new: list[int] = []  # may not have an address yet
        self._window: list[int] = []

    def rate(self, storage: int) -> float:
        weight = self.context.nbytes(storage) * self.idle_seconds(storage)
        return self._cost(storage) / weight if weight > 0 else math.inf

    def _cost(self, storage: int) -> float:
        return min(replay_seconds(self.context, storage), swap_seconds(self.context, storage))

    # -- addresses of blocks --------------------------------------------------------------------------------------

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

    def _iterate_victims(self, sample: int = SAMPLE) -> Iterator[int]:
        while self._window:
            storage = self._window.pop()
            if storage in self._here:
                yield storage
        yield from super()._iterate_victims(sample)

    def _find_window(self, nbytes: int) -> list[int]:
        """Return the cheapest window of at least `nbytes`; empty if there is none."""
        count = len(self._blocks)
        starts = range(count) if count <= STARTS else self._here.draw_numbers(count, STARTS)
        least: tuple[float, list[int]] = (math.inf, [])
        for start in starts:
            found = self._widen(start, nbytes, least[0])
            if found is not None:
                least = found
        return least[1]

    def _widen(self, start: int, nbytes: int, least: float) -> tuple[float, list[int]] | None:
        """Return (cost, storages) of the window from block `start`; None if too small, or not cheaper than `least`."""
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
