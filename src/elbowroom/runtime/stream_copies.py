"""Copies that streams make, and transfers that may still run."""

from __future__ import annotations

import torch

from elbowroom.runtime.copies import Record
from elbowroom.runtime.streams import StreamEvent
from elbowroom.tiers.pinned import SlabBlock


class StreamCopy:
    """A storage's block in host memory, or in the spill file if it has none.

    Attributes:
        nbytes: its size.
        block: where it is in host memory; None if it is in the spill file.
        offset: where it is in the spill file.
        record: of the copy; None once it is discarded.
        last: the end of the last transfer that was begun; everything before it has ended too.
        moving: transfers that nothing has been made to wait for yet.
        error: what went wrong on the disk.
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
        """Release the storages of the copy's transfers: later compute comes after them, so the memory may be reused."""
        for unfinished in self.moving:
            unfinished.storage = None
        self.moving.clear()


class Unfinished:
    """A transfer that may still run: the host memory that it uses, and the storage until somebody waits for it.

    There is one before the transfer is begun, so that its memory is kept whatever happens meanwhile. `event` is its
    end; None where an exception came before that was known.
    """

    __slots__ = ("begin", "end", "event", "storage")

    def __init__(self, copy: StreamCopy, storage: torch.UntypedStorage) -> None:
        self.begin = copy.block.address if copy.block is not None else 0
        self.end = self.begin + copy.nbytes if copy.block is not None else 0
        self.storage: torch.UntypedStorage | None = storage
        self.event: StreamEvent | None = None
