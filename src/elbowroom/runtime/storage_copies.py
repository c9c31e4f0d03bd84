"""Copies of model state in the tier below."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.transfers import Transfers


class StorageCopies:
    """Copies of storages, which are valid until the storages are written to.

    When the tier has no room, copies of storages that are in memory are given up.

    Args:
        transfers: moves bytes to the tier below.
        lock: held while copies are given up.

    Attributes:
        by_record: the copies, by the record of the storage.
        leaving: records of storages that are about to leave, whose copies are not given up.
    """

    def __init__(self, transfers: Transfers, lock: Any) -> None:
        self._transfers = transfers
        self._lock = lock
        self.by_record: dict[Any, Copy] = {}
        self.leaving = set[Any]()
        transfers.give_up = functools.partial(_give_up, weakref.ref(self))

    def is_missing(self, record: Any) -> bool:
        """Tell whether a storage has no valid copy."""
        return record.is_written or record not in self.by_record

    def begin(self, record: Any, storage: torch.UntypedStorage) -> bool:
        """Begin to copy a storage out. Return False if an op uses it, which may be writing to it.

        Raises:
            TierError: it cannot be copied.
        """
        self.discard(record)
        if not record.begin_copy():
            return False
        try:
            with Hidden():
                self.by_record[record] = self._transfers.offload(storage)
        except BaseException:
            record.is_written = True
            raise
        return True

    def discard(self, record: Any) -> None:
        """Give up the copy of a storage that is in memory."""
        record.is_written = True
        copy = self.by_record.pop(record, None)
        if copy is not None:
            self._transfers.discard(copy)

    def give_up(self) -> bool:
        """Give up copies of storages that are in memory. Return whether there were any.

        All that are out of date, or if there are none, the oldest one.
        """
        with self._lock:
            here = [each for each in self.by_record if not each.is_away and each not in self.leaving]
            for record in [each for each in here if each.is_written] or here[:1]:
                self.discard(record)
            return bool(here)


def _give_up(copies: weakref.ref[StorageCopies]) -> bool:
    found = copies()
    return found is not None and found.give_up()
