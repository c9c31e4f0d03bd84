"""Bytes on the device while an online step goes on: who holds each storage, and how much that is now."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.layout.caching import CachingAllocator
from elbowroom.simulator.allocator_model import Stay


class LiveMemory:
    """Counts the holders of storages: autograd's claim on the device, the program, and backward nodes.

    Args:
        rounded: bytes of each storage, as the device's allocator counts them.
        allocator: chooses addresses; None where nobody asks for them.

    Attributes:
        live_bytes: on the device now.
        entry_peak: most bytes during the entry at hand.
        addresses: of storages that are on the device.
        stays: from when to when storages were on the device, without those that are there now.
    """

    def __init__(self, rounded: Sequence[int], allocator: CachingAllocator | None) -> None:
        self._rounded, self._allocator = rounded, allocator
        self._holds = [0] * len(rounded)  # of the program and of nodes
        self._claims: set[int] = set()
        self._recent_peak = 0
        self.live_bytes = self.entry_peak = 0
        self.addresses: dict[int, int] = {}
        self.stays: list[Stay] = []
        self._entry = -1
        self._since: dict[int, int] = {}

    def is_here(self, storage: int) -> bool:
        """Tell whether a storage is on the device."""
        return storage in self._claims or self._holds[storage] > 0

    def is_claimed_alone(self, storage: int) -> bool:
        """Tell whether a storage is on the device for autograd alone."""
        return storage in self._claims and not self._holds[storage]

    def hold(self, storage: int) -> None:
        """Count one more holder: the program, or a node."""
        is_new = not self.is_here(storage)
        self._holds[storage] += 1
        if is_new:
            self._take(storage)

    def let_go(self, storage: int) -> None:
        """Count one holder less."""
        self._holds[storage] -= 1
        if not self.is_here(storage):
            self._give(storage)

    def claim(self, storage: int) -> None:
        """Keep a storage on the device for autograd."""
        is_new = not self.is_here(storage)
        self._claims.add(storage)
        if is_new:
            self._take(storage)

    def unclaim(self, storage: int) -> bool:
        """Keep a storage no longer for autograd; returns whether that was so."""
        if storage not in self._claims:
            return False
        self._claims.remove(storage)
        if not self.is_here(storage):
            self._give(storage)
        return True

    def begin_entry(self, tick: int) -> None:
        """Begin with an entry: what is let go from now on is gone before it."""
        self._entry = tick

    def measure_entry(self) -> None:
        """Begin to measure `entry_peak`: what is over with this entry has been let go."""
        self.entry_peak = self.live_bytes

    def list_stays(self) -> list[Stay]:
        """Return `stays`, and those of what is there now, which end with this entry."""
        here = (Stay(storage=storage, begin=since, end=self._entry) for storage, since in self._since.items())
        return [*self.stays, *here]

    def note(self, extra_bytes: int) -> None:
        """Note bytes that are there for a moment, beside what is counted."""
        self.entry_peak = max(self.entry_peak, self.live_bytes + extra_bytes)

    def note_request(self, nbytes: int) -> None:
        """Note that an op of the step asks for bytes, whether there is room or not."""
        self._recent_peak = max(self._recent_peak, self.live_bytes + nbytes)

    def take_recent_peak(self) -> int:
        """Return the most bytes that ops have asked for since this was last called, beside what was there."""
        most, self._recent_peak = self._recent_peak, self.live_bytes
        return most

    def _take(self, storage: int) -> None:
        nbytes = self._rounded[storage]
        self.live_bytes += nbytes
        self._since[storage] = self._entry
        self.note(0)
        if self._allocator is not None and nbytes:
            self.addresses[storage] = self._allocator.take(nbytes)

    def _give(self, storage: int) -> None:
        self.live_bytes -= self._rounded[storage]
        self.stays.append(Stay(storage=storage, begin=self._since.pop(storage), end=self._entry))
        if self._allocator is not None and storage in self.addresses:
            self._allocator.give(self.addresses.pop(storage))
