"""The storages that a step knows, and the bytes that the room holds."""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from elbowroom.hooks.ledger import Ledger
from elbowroom.native import library
from elbowroom.ops.op_info import describe_op
from elbowroom.runtime.residence import Residence

NO_LIMIT = 1 << 62
"""Bytes. Of a step that is over."""


@functools.cache
def load_native() -> ModuleType:
    """Return the extension that watches steps."""
    native = library.load()
    native.learn(describe_op, Residence)
    return native


class Account:
    """Knows the storages of one step; several threads may use it at once.

    Args:
        ledger: counts what the room holds.
        alignment_bytes: a block takes a multiple of it.

    Attributes:
        table: of the extension; has a record of each storage.
        limit_bytes: no more is to be there; whoever makes room says so.
    """

    def __init__(self, ledger: Ledger, alignment_bytes: int) -> None:
        self.table = load_native().StorageTable(ledger.scope)
        self._ledger, self._alignment = ledger, alignment_bytes
        self.limit_bytes = NO_LIMIT

    @property
    def live_bytes(self) -> int:
        """Bytes that the room holds now."""
        return self._ledger.live_bytes

    def take_recent_peak(self) -> int:
        """Return the most that the room held since this was last called."""
        return self._ledger.take_recent_peak()

    def set_limit(self, nbytes: int) -> None:
        """Have room asked for, from now on, before more than so much is there."""
        self.limit_bytes = nbytes
        self._ledger.set_limit(nbytes)

    def has_room(self, nbytes: int) -> bool:
        """Tell whether so much fits beside what is there."""
        return self.live_bytes + nbytes <= self.limit_bytes

    def find(self, storage: torch.UntypedStorage) -> Residence | None:
        """The residence of a storage; None if the step does not know it."""
        found: Residence | None = self.table.find(storage)
        return found

    def see(self, storage: torch.UntypedStorage) -> Residence:
        """The residence of a storage, which the step knows from now on."""
        found: Residence = self.table.see(storage)
        return found

    def put(self, storage: torch.UntypedStorage, residence: Residence) -> None:
        """A storage has been brought back: it has another address and the same contents."""
        self.table.put(storage, residence.record)

    def mark_staying(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        """Note which storages outlive the step: those of the strided ones of these that are on the device."""
        self.table.mark_staying(tensors, device.type)

    def round(self, nbytes: int) -> int:
        """What a block of so many bytes takes."""
        return -(-nbytes // self._alignment) * self._alignment
