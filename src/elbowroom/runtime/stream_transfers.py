"""Transfers between a device and the host on streams: every order that matters is an event, and the host goes on.

    compute   save o............wait, drop the source.....allocate o...........wait, use
                    \\          /                                    \\         /
    out              o--copy--o......................................\\......./...........
                               \\                                      \\     /
    back      ..................o (never before its own copy out) ......o--copy--o.......

What does not fit into the host's memory goes through a piece of it to a spill file, and the host waits meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator

import torch

from elbowroom.cost.transfers import STAGING_BYTES, count_piece_bytes
from elbowroom.errors import InternalError, TierFull, TransferFailed, UsageError
from elbowroom.ir.placement import Berth, Placement
from elbowroom.runtime.streams import Event, Streams
from elbowroom.runtime.transfers import Copy
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import Block, HostSlabs

logger = logging.getLogger(__name__)


class StreamCopy:
    """A storage's block in host memory, or in the spill file if it has none.

    Attributes:
        nbytes: its size.
        block: where it is in host memory; None if it is in the spill file.
        offset: where it is in the spill file.
        last: the end of the last transfer that was begun; everything before it has ended too.
        moving: storages that transfers read or write which nothing has been made to wait for yet.
        error: what went wrong on the disk.
    """

    __slots__ = ("block", "error", "last", "moving", "nbytes", "offset")

    def __init__(self, nbytes: int, block: Block | None = None, offset: int = 0) -> None:
        self.nbytes, self.block, self.offset = nbytes, block, offset
        self.last: Event | None = None
        self.moving: list[torch.UntypedStorage] = []
        self.error: OSError | None = None


class _Unfinished:
    """A transfer whose copy was discarded while it ran: the host memory it uses, and the storages."""

    __slots__ = ("begin", "end", "event", "moving")

    def __init__(self, copy: StreamCopy, event: Event) -> None:
        self.begin = copy.block.address if copy.block is not None else 0
        self.end = self.begin + copy.nbytes if copy.block is not None else 0
        self.event, self.moving = event, copy.moving


class StreamTransfers:
    """Moves storages of a device to host memory and back, and beyond that to a spill file if there is one.

    Storages in flight are held here until `finish`, and those of a copy discarded before that until the transfer has
    ended, so that no memory is reused under a transfer.

    Args:
        streams: the device's lanes.
        host: where copies go first.
        spill: where they go when `host` is full; nowhere if None.
        staging_bytes: how much of `host` is set aside for what passes through to the spill file; at most a quarter of
            it is used.

    Attributes:
        stall_seconds: time the host waited, for the disk or for a device.
        offloaded_bytes, reloaded_bytes: begun so far.

    Raises:
        TierFull: `host` has no room to pass anything through.
    """

    def __init__(
        self, streams: Streams, host: HostSlabs, spill: SpillFile | None = None, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self._streams, self._host, self._spill = streams, host, spill
        self._staging = None
        if spill is not None:
            self._staging = _Staging(streams, host, spill, count_piece_bytes(host.capacity_bytes, staging_bytes))
        self._unfinished: deque[_Unfinished] = deque()
        self._copies = 0
        self._closing = self._stopped = False
        self.stall_seconds = 0.0
        self.offloaded_bytes = self.reloaded_bytes = 0

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """The next step's copies are laid out like this."""
        self._host.prepare(placement.lower_bytes, gives_back=gives_back, settle=self._wait_for_unfinished)
        if self._spill is not None:
            self._spill.prepare(placement.disk_bytes, gives_back=gives_back)

    def offload(self, storage: torch.UntypedStorage, berth: Berth | None = None) -> StreamCopy:
        """Begin copying a storage down, to where it was planned to lie.

        Raises:
            UsageError: the storage is on another device.
            TierFull: there is no room; nothing was begun.
        """
        if self._stopped:
            raise InternalError("an offload was asked for after the transfers had been closed")
        if storage.device != self._streams.device:
            raise UsageError(
                f"a storage on {storage.device} cannot be moved by the transfers of {self._streams.device}; "
                "fit each device's part of the model by itself"
            )
        self._forget_ended()
        nbytes = storage.nbytes()
        at, is_for_disk = (None, False) if berth is None else (berth.offset, berth.is_on_disk)
        block = None
        if not is_for_disk or self._staging is None:
            try:
                block = self._reserve(nbytes, None if is_for_disk else at)
            except TierFull:
                if self._staging is None:
                    raise
        if block is None:
            assert self._staging is not None and self._spill is not None
            copy = StreamCopy(nbytes, offset=self._spill.reserve(nbytes, at if is_for_disk else None))
            self._write_out(self._staging, storage, copy)
        else:
            copy = StreamCopy(nbytes, block)
            after = [self._streams.record_compute(), *self._users_of(block)]
            copy.last = self._streams.copy_out(storage, block.tensor, after)
        copy.moving.append(storage)
        self._copies += 1
        self.offloaded_bytes += nbytes
        return copy

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        """Make room on the device and begin copying back. The copy stays valid.

        Raises:
            TransferFailed: no memory.
        """
        assert isinstance(copy, StreamCopy)
        self._forget_ended()
        storage = self._streams.allocate(copy.nbytes)
        # Recorded after the allocation: what was computed in this memory before must not come after the copy.
        after = [self._streams.record_compute()]
        copy.moving.append(storage)
        if copy.last is not None:
            after.append(copy.last)
        if copy.block is not None:
            copy.last = self._streams.copy_in(copy.block.tensor, storage, after)
        else:
            assert self._staging is not None
            self._read_back(self._staging, storage, copy, after)
        self.reloaded_bytes += copy.nbytes
        return storage

    def finish(self, copy: Copy) -> None:
        """Make what is computed from now on come after the copy's last transfer. The host does not wait.

        Raises:
            TransferFailed: it did not complete. After an offload the storage is intact.
        """
        assert isinstance(copy, StreamCopy)
        if copy.last is not None:
            self._streams.compute_waits(copy.last)
        copy.moving.clear()
        if copy.error is not None:
            error, copy.error = copy.error, None
            assert self._spill is not None
            raise TransferFailed(
                f"moving {copy.nbytes} bytes to or from the spill file in {self._spill.folder} failed: {error}"
            ) from error

    def discard(self, copy: Copy) -> None:
        """Give the copy's room back. Whoever gets it next waits for what still runs there.

        The program does not wait: a reload in flight is still to be finished before its storage is used.
        """
        assert isinstance(copy, StreamCopy)
        if copy.last is None or copy.last.is_done():
            copy.moving.clear()
        else:
            self._unfinished.append(_Unfinished(copy, copy.last))
        if copy.block is not None:
            self._host.free(copy.block)
        else:
            assert self._spill is not None
            self._spill.free(copy.offset, copy.nbytes)
        self._copies -= 1
        self._forget_ended()
        if self._closing and self._copies == 0:
            self._stop()

    def close(self) -> None:
        """Stop, once the last copy is discarded; until then copies can still be reloaded."""
        self._closing = True
        if self._copies == 0:
            self._stop()

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        # What runs in the staging memory too: its last transfers belong to copies, and every copy is discarded by now.
        self._wait_for_unfinished()
        self._host.close()
        if self._spill is not None:
            self._spill.close()

    # Host memory ------------------------------------------------------------------------------------------------

    def _reserve(self, nbytes: int, at: int | None) -> Block:
        try:
            return self._host.reserve(nbytes, at)
        except TierFull:
            if not self._host.fits_after_release(nbytes):
                raise
        # There is room, but in slabs of the wrong size. They may only go when nothing runs in them.
        logger.debug("giving empty slabs of host memory back to make room for %d bytes", nbytes)
        self._wait_for_unfinished()
        self._host.release_empty()
        return self._host.reserve(nbytes)

    def _users_of(self, block: Block) -> list[Event]:
        """The ends of discarded transfers that may still run somewhere in a block."""
        begin, end = block.address, block.address + block.nbytes
        return [user.event for user in self._unfinished if user.begin < end and begin < user.end]

    def _forget_ended(self) -> None:
        # Oldest first and no further than the first that still runs: this happens at every transfer.
        while self._unfinished and self._unfinished[0].event.is_done():
            self._unfinished.popleft()

    def _wait_for_unfinished(self) -> None:
        with self._stalling():
            for user in self._unfinished:
                self._streams.host_waits(user.event)
        self._unfinished.clear()

    # The spill file ---------------------------------------------------------------------------------------------

    def _write_out(self, staging: _Staging, storage: torch.UntypedStorage, copy: StreamCopy) -> None:
        with self._stalling():
            try:
                staging.write_out(storage, copy, self._streams.record_compute())
            except OSError as error:
                copy.error = error

    def _read_back(
        self, staging: _Staging, storage: torch.UntypedStorage, copy: StreamCopy, after: list[Event]
    ) -> None:
        with self._stalling():
            try:
                staging.read_back(storage, copy, after)
            except OSError as error:
                copy.error = error

    @contextlib.contextmanager
    def _stalling(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - begin


class _Staging:
    """Two halves of a block of host memory, used in turn: the disk works on one while the device copies the other."""

    def __init__(self, streams: Streams, host: HostSlabs, spill: SpillFile, piece_bytes: int) -> None:
        self._streams, self._spill = streams, spill
        self._piece_bytes = piece_bytes
        block = host.reserve_apart(2 * self._piece_bytes)
        self._halves = block.tensor.split(self._piece_bytes)
        self._last: list[Event | None] = [None, None]  # the device's last transfer from or to each half

    def write_out(self, storage: torch.UntypedStorage, copy: StreamCopy, computed: Event) -> None:
        """Copy a storage into the spill file, after an event; back when all is written.

        Raises:
            OSError: not all could be written.
        """
        written = 0
        for index, begin in enumerate(range(0, copy.nbytes, self._piece_bytes)):
            half = index % 2
            piece = self._halves[half][: copy.nbytes - begin]
            busy = self._last[half]
            after = [computed] if busy is None else [computed, busy]
            self._last[half] = copy.last = self._streams.copy_out(storage, piece, after, begin)
            # The piece before this one is written while this one is on its way.
            if index > 0:
                written += self._write(1 - half, copy, written)
        if written < copy.nbytes:
            self._write(half, copy, written)

    def _write(self, half: int, copy: StreamCopy, begin: int) -> int:
        nbytes = min(self._piece_bytes, copy.nbytes - begin)
        event = self._last[half]
        assert event is not None
        self._streams.host_waits(event)
        self._spill.write(copy.offset + begin, self._halves[half].data_ptr(), nbytes)
        return nbytes

    def read_back(self, storage: torch.UntypedStorage, copy: StreamCopy, after: list[Event]) -> None:
        """Copy out of the spill file into a storage, after events; back when all is read.

        Raises:
            OSError: not all could be read.
        """
        for index, begin in enumerate(range(0, copy.nbytes, self._piece_bytes)):
            half = index % 2
            piece = self._halves[half][: copy.nbytes - begin]
            busy = self._last[half]
            if busy is not None:  # the device may still be copying from what is overwritten here
                self._streams.host_waits(busy)
            self._spill.read(copy.offset + begin, piece.data_ptr(), piece.numel())
            self._last[half] = copy.last = self._streams.copy_in(piece, storage, after, begin)
