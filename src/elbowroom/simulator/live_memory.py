"""Tracks the bytes on the device, and the holders of each storage, during an online step."""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.layout.caching import CachingAllocator
from elbowroom.simulator.allocator_model import Stay


class LiveMemory:
    """Counts the holders of storages: autograd's claim on the device, the program, and backward nodes.

    Args:
        rounded: bytes of each storage, as the device's allocator counts them.
        allocator: chooses addresses; None if they are not needed.

    Attributes:
        live_bytes: on the device now.
        entry_peak: peak bytes during the current entry.
        addresses: of storages that are on the device.
        stays: spans during which storages were on the device, current ones excluded.
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
        """Return True if a storage is on the device."""
        return storage in self._claims or self._holds[storage] > 0

    def is_claimed_alone(self, storage: int) -> bool:
        """Return True if only autograd holds a storage on the device."""
        return storage in self._claims and not self._holds[storage]

    def hold(self, storage: int) -> None:
        """Add a holder: the program, or a node."""
        is_new = not self.is_here(storage)
        self._holds[storage] += 1
        if is_new:
            self._take(storage)

    def let_go(self, storage: int) -> None:
        """Remove a holder."""
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
        """Stop keeping a storage for autograd. Return True if it was kept for autograd."""
        if storage not in self._claims:
            return False
        self._claims.remove(storage)
        if not self.is_here(storage):
            self._give(storage)
        return True

    def begin_entry(self, tick: int) -> None:
        """Begin an entry: storages released from now on are freed before it."""
        self._entry = tick

    def measure_entry(self) -> None:
        """Start measuring `entry_peak`, once storages that end before this entry are freed."""
        self.entry_peak = self.live_bytes

    def list_stays(self) -> list[Stay]:
        """Return `stays`, plus those of the storages that are on the device now, ended at this entry."""
        here = (Stay(storage=storage, begin=since, end=self._entry) for storage, since in self._since.items())
        return [*self.stays, *here]

    def note(self, extra_bytes: int) -> None:
        """Record a momentary allocation on top of the live bytes."""
        self.entry_peak = max(self.entry_peak, self.live_bytes + extra_bytes)

    def note_request(self, nbytes: int) -> None:
        """Record a request of an op of the step, whether it fits or not."""
        self._recent_peak = max(self._recent_peak, self.live_bytes + nbytes)

    def take_recent_peak(self) -> int:
        """Return the peak of live and requested bytes since the last call."""
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
