"""A spill file and the thread that reads and writes it, for one process: first come, first served.

An exception may strike at any line here: Ctrl-C in the main thread, or no memory. So a transfer is in the queue before
anybody waits for it, whoever waits makes sure that there is a thread, and a copy that nobody holds is freed by the
thread.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import weakref
from collections import deque

import torch

from elbowroom.errors import TransferFailed
from elbowroom.hooks.storage_ids import get_address
from elbowroom.ir.placement import Placement
from elbowroom.runtime.copies import Record, Records
from elbowroom.tiers.disk import SpillFile

CHECK_SECONDS = 1.0
"""Whoever waits looks so often whether the thread is still there."""

RETRY_SECONDS = 0.01
"""The thread waits so long before it repeats what an exception ended."""


class SpillCopy:
    """A storage's block in a spill file.

    Attributes:
        nbytes: its size.
        queue: has the file.
        offset: of the block.
        record: of the copy; None once it is discarded.
        last: the last transfer that was begun; everything before it has ended when it has.
        error: why the contents could not be written, if they could not.
    """

    __slots__ = ("__weakref__", "error", "last", "nbytes", "offset", "queue", "record")

    def __init__(self, nbytes: int, queue: SpillQueue) -> None:
        self.nbytes, self.queue = nbytes, queue
        self.offset = -1
        self.record: Record | None = None
        self.last: SpillJob | None = None
        self.error: BaseException | None = None


class SpillJob:
    """One transfer. It holds the copy and the storage until it is done, whoever else may have dropped them.

    Attributes:
        is_done: whether it has ended.
        ended: locked until then. (Ctrl-C in `threading.Event.wait` may leave its lock locked, and `set` wait for it.)
        error: why it could not read.
    """

    __slots__ = ("_copy", "_is_out", "_storage", "ended", "error", "is_done")

    def __init__(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage) -> None:
        self._copy: SpillCopy | None = copy
        self._storage: torch.UntypedStorage | None = storage
        self._is_out = is_out
        self.error: BaseException | None = None
        self.is_done, self.ended = False, threading.Lock()
        self.ended.acquire()

    def run(self, spill: SpillFile) -> None:
        """Carry it out. An error is for whoever waits; the thread goes on."""
        copy, storage = self._copy, self._storage
        assert copy is not None and storage is not None
        try:
            (spill.write if self._is_out else spill.read)(copy.offset, get_address(storage), copy.nbytes)
        except BaseException as error:
            if self._is_out:
                copy.error = error
            else:
                self.error = error
        finally:
            del copy, storage
            self._copy = self._storage = None  # before anyone counts on its being free
            self.is_done = True
            self.ended.release()


class SpillQueue:
    """Reads and writes a spill file on one thread, for the process that made it.

    Args:
        spill: the file; closed in the end.
        owner: when it is gone, the queue is closed.

    Attributes:
        pid: of the process.
        spill: as given.
    """

    def __init__(self, spill: SpillFile, owner: object) -> None:
        self.pid, self.spill = os.getpid(), spill
        self._jobs: queue.SimpleQueue[SpillJob | weakref.ref[object] | None] = queue.SimpleQueue()
        self._owner = weakref.ref(owner, self._jobs.put)  # a method of C: nothing can end it halfway
        self._records = Records(self._restore, self._jobs.put)
        self._discarded: deque[tuple[Record, SpillJob | None]] = deque()
        self._lock = threading.RLock()  # of what is above and below, and of the blocks of the spill file
        self._closing = self._stopped = False
        self._thread: threading.Thread | None = None
        self._working = threading.Lock()  # held by the thread while it works

    @property
    def copies(self) -> int:
        """Number of copies."""
        return len(self._records)

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """Prepare the spill file, as `Transfers.prepare` says."""
        with self._lock:
            self._sweep()
            with self._records.changing():
                self.spill.prepare(placement.lower_bytes, gives_back=gives_back)

    def make_copy(self, nbytes: int, at: int | None) -> SpillCopy:
        """A copy with a block of its own; nothing is in it yet.

        Raises:
            TierFull: there is no room.
            TransferFailed: the queue is closed, or the file cannot grow.
        """
        copy = SpillCopy(nbytes, self)
        with self._lock:
            if self._stopped:
                raise TransferFailed("the spill file is closed")
            self._sweep()  # what could not be swept in time would be in the way of what is planned to be there
            record = self._records.reserve(copy, lambda: self.spill.reserve(nbytes, at))
            copy.record, copy.offset = record, record.block
        return copy

    def submit(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage) -> None:
        """Begin a transfer.

        Raises:
            TransferFailed: there is no thread and none can be started; nothing was begun.
        """
        job = SpillJob(copy, is_out, storage)
        self._start()
        self._jobs.put(job)
        copy.last = job

    def wait(self, copy: SpillCopy) -> None:
        """Return when the copy's last transfer has ended.

        Raises:
            TransferFailed: there is no thread any more and none can be started, or the interpreter ends.
        """
        job = copy.last
        if job is None or self.is_own_thread():
            return  # own thread: the garbage collector is freeing something; the job holds the storage until it is done
        while not job.is_done:
            if job.ended.acquire(timeout=CHECK_SECONDS):
                job.ended.release()  # others may wait for it too
            elif sys.is_finalizing():
                raise TransferFailed("the interpreter ends, and its threads do nothing any more")
            else:
                self._start()

    def discard(self, copy: SpillCopy) -> None:
        """Give the copy's block back, as soon as its last transfer has ended."""
        record = copy.record
        if record is not None:
            self._discarded.append((record, copy.last))
            copy.record = None
        self.settle()

    def close(self) -> None:
        """Stop, once the last copy is gone."""
        self._closing = True
        self.settle()

    def settle(self) -> None:
        """Free what was discarded, and stop if nothing is left to wait for. Called by any thread, at any moment."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._jobs.put(None)  # the garbage collector is at work in the middle of a change: the thread does it
            return
        with self._lock:
            is_over = self._tidy()
        if is_over:
            self._jobs.put(None)
            if not self.is_own_thread():
                if self._thread is not None and not sys.is_finalizing():
                    self._thread.join()
                self.spill.close()  # if there was no thread, or an error has ended it

    def is_own_thread(self) -> bool:
        """Tell whether the caller is the queue's own thread."""
        return threading.current_thread() is self._thread

    # With the lock ----------------------------------------------------------------------------------------------

    def _tidy(self) -> bool:
        """Free what was discarded; whether nothing is left, and nobody will come."""
        self._sweep()
        if self._closing or self._owner() is None:
            for record in self._records.list_lost():
                self._free(record)  # the thread would do it, if there ever was one
            self._stopped |= not self._records
        return self._stopped

    def _sweep(self) -> None:
        self._records.repair()
        for _ in range(len(self._discarded)):
            record, last = self._discarded.popleft()
            if last is None or last.is_done:
                self._free(record)
            else:
                self._discarded.append((record, last))

    def _free(self, record: Record) -> None:
        self._records.free(record, lambda record: self.spill.free(record.block, record.nbytes))

    def _restore(self, records: list[Record]) -> None:
        self.spill.restore([(record.block, record.nbytes) for record in records])

    # The thread -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Make sure that there is a thread."""
        if self._working.locked():
            return
        thread = threading.Thread(target=self._work, name="elbowroom-transfers", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TransferFailed(
                f"the thread that reads and writes the spill file in {self.spill.folder} cannot be started: {error}; "
                "raise the limit on threads (`ulimit -u`, or the pids limit of the container)"
            ) from error

    def _work(self) -> None:
        if not self._working.acquire(blocking=False):
            return  # another one was started while this one was slow to begin
        self._thread = threading.current_thread()
        try:
            while not self._take():
                pass
            self.spill.close()
        finally:
            self._working.release()

    def _take(self) -> bool:
        """Take the next job; whether it was the last."""
        job = self._jobs.get()
        try:
            if isinstance(job, SpillJob):
                job.run(self.spill)
            with self._lock:
                if isinstance(job, Record):  # nobody holds the copy any more
                    self._free(job)
                del job
                return self._tidy()
        except Exception:  # no memory, say: this thread must go on
            time.sleep(RETRY_SECONDS)
            self._jobs.put(None)
            return False
