"""Counts the bytes of all storages that a step has seen and that are still there."""

from __future__ import annotations

from collections import deque

import torch

from elbowroom.hooks.identity import Identities
from elbowroom.runtime.residence import Residence


class Account(Identities[Residence]):
    """The residence of each living storage, and what they take together.

    Args:
        alignment_bytes: a block takes a multiple of it.

    Attributes:
        reserved_bytes: what is about to be allocated.
        peak_bytes: most that there was at once, with what was reserved.
    """

    def __init__(self, alignment_bytes: int) -> None:
        # A storage may die at any moment, in any thread: its bytes are taken off when somebody looks.
        self._dead: deque[int] = deque()
        super().__init__(lambda residence: self._dead.append(self.round(residence.nbytes)))
        self._alignment = alignment_bytes
        self._bytes = self.reserved_bytes = self.peak_bytes = 0

    def put(self, storage: torch.UntypedStorage, item: Residence) -> None:
        """Count a storage. `item.nbytes` is its size from now on."""
        super().put(storage, item)
        self._bytes += self.round(item.nbytes)

    def measure(self, storage: torch.UntypedStorage, residence: Residence) -> None:
        """Count a storage anew, which an op may have resized."""
        before, residence.nbytes = residence.nbytes, storage.nbytes()
        self._bytes += self.round(residence.nbytes) - self.round(before)

    def round(self, nbytes: int) -> int:
        """What a block of so many bytes takes."""
        return -(-nbytes // self._alignment) * self._alignment

    @property
    def live_bytes(self) -> int:
        """What is there, and what was reserved."""
        while self._dead:
            self._bytes -= self._dead.popleft()
        live = self._bytes + self.reserved_bytes
        self.peak_bytes = max(self.peak_bytes, live)
        return live
