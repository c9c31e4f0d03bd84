"""Copies between a device and the spill file through a staging block in host memory."""

from __future__ import annotations

import torch

from elbowroom.runtime.stream_copies import StreamCopy
from elbowroom.runtime.streams import StreamEvent, Streams
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs


class Staging:
    """Double buffer in host memory: the disk works on one half while the device copies the other.

    Attributes:
        block: block of both halves.
        piece_bytes: bytes copied at a time, at most a half.

    Raises:
        TierFull: the host has no room for the block.
    """

    def __init__(self, streams: Streams, host: HostSlabs, spill: SpillFile, piece_bytes: int) -> None:
        self._streams, self._spill = streams, spill
        self.piece_bytes = piece_bytes
        self.block = host.reserve_apart(2 * piece_bytes)
        self._halves = [self.block.cut(begin, piece_bytes) for begin in (0, piece_bytes)]
        self._last: list[StreamEvent | None] = [None, None]  # the device's last transfer from or to each half

    def prepare(self, piece_bytes: int | None) -> None:
        """Set the bytes to copy at a time; a whole half if None."""
        half_bytes = self._halves[0].nbytes
        self.piece_bytes = half_bytes if piece_bytes is None else min(piece_bytes, half_bytes)

    def write_out(self, storage: torch.UntypedStorage, copy: StreamCopy, computed: StreamEvent) -> None:
        """Copy a storage into the spill file, after an event. Returns when all is written.

        Raises:
            OSError: the write failed.
        """
        written = 0
        for index, begin in enumerate(range(0, copy.nbytes, self.piece_bytes)):
            half = index % 2
            piece = self._halves[half].cut(0, min(self.piece_bytes, copy.nbytes - begin))
            busy = self._last[half]
            after = [computed] if busy is None else [computed, busy]
            self._last[half] = copy.last = self._streams.copy_out(storage, piece, after, begin)
            # Write the previous piece while this one is being copied.
            if index > 0:
                written += self._write(1 - half, copy, written)
        if written < copy.nbytes:
            self._write(half, copy, written)

    def _write(self, half: int, copy: StreamCopy, begin: int) -> int:
        nbytes = min(self.piece_bytes, copy.nbytes - begin)
        event = self._last[half]
        assert event is not None
        self._streams.host_waits(event)
        self._spill.write(copy.offset + begin, self._halves[half].address, nbytes)
        return nbytes

    def read_back(self, storage: torch.UntypedStorage, copy: StreamCopy, after: list[StreamEvent]) -> None:
        """Copy from the spill file into a storage, after events. Returns when all is read.

        Raises:
            OSError: the read failed.
        """
        for index, begin in enumerate(range(0, copy.nbytes, self.piece_bytes)):
            half = index % 2
            piece = self._halves[half].cut(0, min(self.piece_bytes, copy.nbytes - begin))
            busy = self._last[half]
            if busy is not None:  # the device may still be copying from this half
                self._streams.host_waits(busy)
            self._spill.read(copy.offset + begin, piece.address, piece.nbytes)
            self._last[half] = copy.last = self._streams.copy_in(piece, storage, after, begin)
