"""Transfers between a device and the host on streams, ordered by events, so that the host does not wait.

    compute   save o............wait, drop the source.....allocate o...........wait, use
                    \\          /                                    \\         /
    out              o--copy--o......................................\\......./...........
                               \\                                      \\     /
    back      ..................o (never before its own copy out) ......o--copy--o.......

Copies that exceed the host memory go through a staging block to a spill file; the host waits for these.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from elbowroom.cost.transfers import STAGING_BYTES, count_piece_bytes
from elbowroom.errors import InternalError, TransferFailed, UsageError
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.runtime.copies import Copy, Extents, Record, Records
from elbowroom.runtime.staging import Staging
from elbowroom.runtime.stream_copies import StreamCopy
from elbowroom.runtime.streams import Streams
from elbowroom.runtime.tier_blocks import TierBlocks
from elbowroom.runtime.transfers import Finish, check_process, retry_when_full
from elbowroom.runtime.transfers_in_flight import TransfersInFlight
from elbowroom.tiers.disk import SpillFile, raise_foreign
from elbowroom.tiers.pinned import HostSlabs, SlabBlock

Block = TypeVar("Block", SlabBlock, int, SlabBlock | int)

logger = logging.getLogger(__name__)


class StreamTransfers:
    """Moves storages of a device to host memory and back, or to a spill file when host memory is full.

    A forked process can move nothing, since it cannot use the device.

    Args:
        streams: streams of the device.
        host: first destination of copies.
        spill: destination when `host` is full; None for none.
        staging_bytes: part of `host` to reserve for staging copies to the spill file; limited to a quarter of `host`.

    Attributes:
        give_up, offloaded_bytes, reloaded_bytes: as for `Transfers`.

    Raises:
        TierFull: `host` has no room for the staging block.
    """

    def __init__(
        self, streams: Streams, host: HostSlabs, spill: SpillFile | None = None, staging_bytes: int = STAGING_BYTES
    ) -> None:
        self.streams = streams
        self._staging = None
        if spill is not None:
            self._staging = Staging(streams, host, spill, count_piece_bytes(host.capacity_bytes, staging_bytes))
        self._in_flight = TransfersInFlight(streams)
        self._blocks = TierBlocks(host, spill, self._in_flight.wait)
        self._spill_folder = "" if spill is None else spill.folder
        self._pid = os.getpid()
        settle = weakref.WeakMethod(self._settle)
        self._records = Records(self._restore, lambda record: (lost := settle()) and lost(has_lost=True))
        self._discarded: deque[Record] = deque()
        self._lock = threading.RLock()  # guards records and tiers
        self._closing = self._stopped = self._has_lost = False
        self.give_up: Callable[[], bool] = lambda: False
        self.reset_figures()

    @property
    def stall_seconds(self) -> float:
        return self._in_flight.stall_seconds

    def reset_figures(self) -> None:
        self._in_flight.stall_seconds = 0.0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0

    @property
    def _copies(self) -> int:
        return len(self._records)

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            self._sweep()
            with self._records.changing():
                self._blocks.prepare(placement, gives_back=gives_back)
                if self._staging is not None:
                    self._staging.prepare(placement.piece_bytes)

    def offload(self, storage: torch.UntypedStorage, copy_slot: CopySlot | None = None) -> StreamCopy:
        """Begin to offload a storage, to its planned slot if there is one.

        Raises:
            UsageError: the storage is on another device.
            TierFull: the tiers have no room; nothing was begun.
            TransferFailed: this is a forked process.
        """
        check_process(self._pid, storage.nbytes())
        if self._stopped:
            raise InternalError("an offload was requested after the transfers were closed")
        if storage.device != self.streams.device:
            raise UsageError(
                f"a storage on {storage.device} cannot be moved by the transfers of {self.streams.device}; "
                "fit the part of the model on each device separately"
            )
        copy, block = self._reserve_copy(storage.nbytes(), lambda: self._blocks.reserve(storage.nbytes(), copy_slot))
        with self._lock:
            if isinstance(block, SlabBlock):
                copy.block = block
                after = [self.streams.record_compute(), *self._in_flight.list_users(block)]
                unfinished = self._in_flight.begin(copy, storage)
                copy.last = self.streams.copy_out(storage, block, after)
                self._in_flight.note_end(unfinished, copy.last)
            else:
                copy.offset = block
                staging = self._staging
                assert staging is not None
                self._pass(storage, copy, lambda: staging.write_out(storage, copy, self.streams.record_compute()))
        self.offloaded_bytes += copy.nbytes
        return copy

    def reload(self, copy: Copy, misalignment: int = 0) -> torch.UntypedStorage:
        assert isinstance(copy, StreamCopy)
        check_process(self._pid, copy.nbytes)
        if copy.record is None:
            raise InternalError("a reload of a discarded copy was requested")
        with self._lock:
            self._in_flight.forget_ended()
            storage = self.streams.allocate(copy.nbytes)
            # Recorded after the allocation, since earlier compute may still use this memory.
            after = [self.streams.record_compute()]
            if copy.last is not None:
                after.append(copy.last)
            if copy.block is not None:
                unfinished = self._in_flight.begin(copy, storage)
                copy.last = self.streams.copy_in(copy.block, storage, after)
                self._in_flight.note_end(unfinished, copy.last)
            else:
                staging = self._staging
                assert staging is not None
                self._pass(storage, copy, lambda: staging.read_back(storage, copy, after))
        self.reloaded_bytes += copy.nbytes
        return storage

    def make_copy(self, nbytes: int) -> StreamCopy:
        check_process(self._pid, nbytes)
        copy, block = self._reserve_copy(nbytes, lambda: self._blocks.reserve_in_memory(nbytes))
        copy.block = block
        return copy

    def _reserve_copy(self, nbytes: int, place: Callable[[], Block]) -> tuple[StreamCopy, Block]:
        """Return a copy without contents, and its block."""
        copy = StreamCopy(nbytes)

        def reserve() -> Block:
            with self._lock:
                self._sweep()
                copy.record = self._records.reserve(copy, place)
                block: Block = copy.record.block
                return block

        return copy, retry_when_full(reserve, self.give_up)

    def move_section(self, copy: Copy, section: torch.UntypedStorage, extents: Extents, *, is_out: bool) -> Finish:
        assert isinstance(copy, StreamCopy)
        check_process(self._pid, copy.nbytes)
        if copy.block is None:
            raise TransferFailed(
                f"a copy of {copy.nbytes} bytes is in the spill file, of which no sections are read; raise host_bytes="
            )
        nbytes = extents.nbytes
        if is_out:
            self.offloaded_bytes += nbytes
        else:
            self.reloaded_bytes += nbytes
        part = StreamCopy(copy.nbytes)
        part.block = copy.block
        with self._lock:
            self._in_flight.forget_ended()
            after = [self.streams.record_compute(), *self._in_flight.list_users(copy.block)]
            unfinished = self._in_flight.begin(part, section)
            for copy_offset, memory_offset in extents.list_runs():
                host = copy.block.cut(copy_offset, extents.run_bytes)
                if is_out:
                    part.last = self.streams.copy_out(section, host, after, memory_offset)
                else:
                    part.last = self.streams.copy_in(host, section, after, memory_offset)
            self._in_flight.note_end(unfinished, part.last)
            copy.last = part.last

        def finish() -> None:
            if part.last is not None:
                self.streams.compute_waits(part.last)
            part.let_go()

        return finish

    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, StreamCopy)
        check_process(self._pid, copy.nbytes)
        if not self._in_flight.is_certain:
            with self._lock:
                self._in_flight.forget_ended()
        if copy.last is not None:
            self.streams.compute_waits(copy.last)
        copy.let_go()
        if copy.error is not None:
            error, copy.error = copy.error, None
            raise TransferFailed(
                f"moving {copy.nbytes} bytes to or from the spill file in {self._spill_folder} failed: {error}"
            ) from error

    def discard(self, copy: Copy) -> None:
        """Free the copy's block. Its next user waits for transfers that still run there.

        The program does not wait: a reload in flight must still be finished before its storage is used.
        """
        assert isinstance(copy, StreamCopy)
        if self._pid != os.getpid():
            return
        if copy.last is None or copy.last.is_done():
            copy.let_go()
        record = copy.record
        if record is not None:
            self._discarded.append(record)
            copy.record = None
        self._settle()

    def close(self) -> None:
        self._closing = True
        self._settle()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self._stop()

    def _settle(self, *, has_lost: bool = False) -> None:
        """Free discarded copies, and stop if closing and empty. Callable from any thread at any moment."""
        self._has_lost |= has_lost
        if self._pid != os.getpid():
            self._stop()
        elif not self._lock._is_owned():  # type: ignore[attr-defined]
            with self._lock:
                self._has_lost |= self._closing
                self._sweep()
                if self._closing and not self._records:
                    self._stop()
        # Otherwise a destructor runs in the middle of a change: the next change sweeps.

    def _sweep(self) -> None:
        self._records.repair()
        while self._discarded:
            self._free(self._discarded.popleft())
        if self._has_lost:  # garbage-collected, but not discarded
            for record in self._records.list_lost():
                self._free(record)
            self._has_lost = False
        self._in_flight.forget_ended()

    def _free(self, record: Record) -> None:
        self._records.free(record, self._blocks.free)

    def _restore(self, records: list[Record]) -> None:
        self._blocks.restore(records, () if self._staging is None else (self._staging.block,))

    def _stop(self) -> None:
        if self._pid == os.getpid():
            self._in_flight.wait()  # for transfers in the staging block, too
        self._stopped = True
        self._blocks.close()

    def _pass(self, storage: torch.UntypedStorage, copy: StreamCopy, move: Callable[[], None]) -> None:
        with self._in_flight.stalling():
            unfinished = self._in_flight.begin(copy, storage)
            try:
                move()
            except OSError as error:
                raise_foreign(error)
                copy.error = error
            self._in_flight.note_end(unfinished, copy.last)
