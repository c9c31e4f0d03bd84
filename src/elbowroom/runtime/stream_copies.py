"""Copies of storages made on streams, and their transfers that may still run."""

from __future__ import annotations

import torch

from elbowroom.runtime.copies import Record
from elbowroom.runtime.streams import StreamEvent
from elbowroom.tiers.pinned import SlabBlock


class StreamCopy:
    """Copy of a storage in host memory or in the spill file.

    Attributes:
        nbytes: size of the storage.
        block: block in host memory; None if the copy is in the spill file.
        offset: offset in the spill file.
        record: record of the copy; None once it is discarded.
        last: end of the last transfer that was begun; earlier ones end before it.
        moving: transfers that compute does not wait for yet.
        error: error of the disk, if any.
    """

    __slots__ = ("__weakref__", "block", "error", "last", "moving", "nbytes", "offset", "record")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.block: SlabBlock | None = None
        self.offset = 0
        self.record: Record | None = None
        self.last: StreamEvent | None = None
        self.moving: list[Unfinished] = []
        self.error: OSError | None = None

    def let_go(self) -> None:
        """Release the storages of the copy's transfers. Later compute waits for them, so the memory may be reused."""
        if self.moving:
            for unfinished in self.moving:
                unfinished.storage = None
            self.moving.clear()


class Unfinished:
    """Transfer that may still run, with its range of host memory and, until compute waits for it, its storage.

    Created before the transfer begins, so that the memory is kept even after an exception. `event` marks the end; it is
    None if an exception came first.
    """

    __slots__ = ("begin", "end", "event", "storage")

    def __init__(self, copy: StreamCopy, storage: torch.UntypedStorage) -> None:
        block = copy.block
        self.begin = self.end = 0
        if block is not None:
            self.begin = block.address
            self.end = block.address + copy.nbytes
        self.storage: torch.UntypedStorage | None = storage
        self.event: StreamEvent | None = None
