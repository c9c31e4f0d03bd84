"""Counts the bytes of all storages that a step has seen and that are still there."""

from __future__ import annotations

import threading
from collections import deque

import torch

from elbowroom.hooks.identity import Identities
from elbowroom.runtime.residence import Residence


class Account(Identities[Residence]):
    """The residence of each living storage, and what they take together. Several threads may use it at once.

    Args:
        alignment_bytes: a block takes a multiple of it.

    Attributes:
        lock: held while anything is counted; whoever looks for a storage and puts it if it is not there holds it, too.
    """

    def __init__(self, alignment_bytes: int) -> None:
        # A storage may die at any moment, in any thread: its bytes are taken off when somebody looks.
        self._dead: deque[int] = deque()
        super().__init__(lambda residence: self._dead.append(self.round(residence.nbytes)))
        self._alignment = alignment_bytes
        self._bytes = self._reserved = 0
        self.lock = threading.RLock()

    def put(self, storage: torch.UntypedStorage, item: Residence) -> None:
        """Count a storage. `item.nbytes` is its size from now on."""
        with self.lock:
            super().put(storage, item)
            self._bytes += self.round(item.nbytes)

    def reserve(self, nbytes: int) -> None:
        """Count what is about to be allocated; negative once that has been done, or not."""
        with self.lock:
            self._reserved += nbytes

    def measure(self, storage: torch.UntypedStorage, residence: Residence) -> None:
        """Count a storage anew, which an op may have resized."""
        with self.lock:
            before, residence.nbytes = residence.nbytes, storage.nbytes()
            self._bytes += self.round(residence.nbytes) - self.round(before)

    def round(self, nbytes: int) -> int:
        """What a block of so many bytes takes."""
        return -(-nbytes // self._alignment) * self._alignment

    @property
    def live_bytes(self) -> int:
        """What is there, and what was reserved."""
        with self.lock:
            while self._dead:
                self._bytes -= self._dead.popleft()
            return self._bytes + self._reserved
