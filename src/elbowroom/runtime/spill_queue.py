"""A spill file with the thread that reads and writes it, first in first out, for one process.

An exception (Ctrl-C in the main thread, out of memory) may be raised at any line here. So a transfer is enqueued before
anyone waits for it, a waiter makes sure that the thread runs, and the thread frees copies without references. Where no
thread can be started (a limit on threads, or no memory for its stack), callers carry out their transfers themselves.
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

from elbowroom._threads import start_thread
from elbowroom.errors import TransferFailed
from elbowroom.hooks.storage_ids import get_address
from elbowroom.ir.placement import Placement
from elbowroom.runtime.copies import Extents, Record, Records
from elbowroom.tiers.disk import SpillFile

CHECK_SECONDS = 1.0
"""Interval at which a waiter checks that the thread still runs."""

WAITS = 10
"""A thread that could not be started is tried again after so many times as long as that took."""

RETRY_SECONDS = 0.01
"""Delay before the thread retries after an exception."""


class SpillCopy:
    """Copy of a storage in a spill file.

    Attributes:
        nbytes: size of the storage.
        queue: queue of the file.
        offset: offset of the block in the file.
        record: record of the copy; None once it is discarded.
        last: last transfer that was begun; earlier ones end before it.
        error: error of the write, if it failed.
    """

    __slots__ = ("__weakref__", "error", "last", "nbytes", "offset", "queue", "record")

    def __init__(self, nbytes: int, queue: SpillQueue) -> None:
        self.nbytes, self.queue = nbytes, queue
        self.offset = -1
        self.record: Record | None = None
        self.last: SpillJob | None = None
        self.error: BaseException | None = None


class SpillJob:
    """One transfer. Holds references to the copy and the storage until it has ended.

    Attributes:
        is_done: whether the transfer has ended.
        ended: locked until then. (A `threading.Event` would not do: Ctrl-C in `wait` may leave its lock locked, and
            `set` would block.)
        queue: of the file.
        nbytes: as many are transferred.
        error: error of the transfer, if it failed; one of a write is an error of the copy, too.
        is_out: whether it is a write.
        begin, end: when it ran, in seconds of `time.perf_counter`; 0 before that.
        subject: id of the storage in its step; -1 if unknown.
    """

    __slots__ = (
        "_copy", "_extents", "_storage", "begin", "end", "ended", "error", "is_done", "is_out", "nbytes", "queue",
        "subject",
    )  # fmt: skip

    def __init__(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage, extents: Extents) -> None:
        self._copy: SpillCopy | None = copy
        self._storage: torch.UntypedStorage | None = storage
        self.is_out = is_out
        self._extents = extents
        self.queue = copy.queue
        self.nbytes = extents.nbytes
        self.error: BaseException | None = None
        self.begin = self.end = 0.0
        self.subject = -1
        self.is_done, self.ended = False, threading.Lock()
        self.ended.acquire()

    def run(self, spill: SpillFile) -> None:
        """Carry out the transfer. Errors are stored for the waiter, so that the thread goes on."""
        copy, storage = self._copy, self._storage
        assert copy is not None and storage is not None
        self.begin = time.perf_counter()
        try:
            move, address = spill.write if self.is_out else spill.read, get_address(storage)
            extents = self._extents
            offset, address = copy.offset + extents.copy_offset, address + extents.memory_offset
            move(offset, address, extents.run_bytes, extents.dimensions)
        except BaseException as error:
            self._note(error)
        finally:
            del copy, storage
            self._finish()

    def fail(self, error: Exception) -> None:
        """End a transfer that could not be carried out, unless it has ended."""
        if not self.is_done:
            self._note(error)
            self._finish()

    def is_of_copy_of(self, other: SpillJob) -> bool:
        """Tell whether this transfer, which has not ended, is of the same copy as another one."""
        return self._copy is other._copy

    def _note(self, error: BaseException) -> None:
        self.error = error
        if self.is_out and self._copy is not None:
            self._copy.error = error

    def _finish(self) -> None:
        self._copy = self._storage = None  # before a waiter expects them to be free
        self.end = time.perf_counter()
        self.is_done = True
        self.ended.release()


class SpillQueue:
    """Reads and writes a spill file, one transfer at a time, for the process that made it.

    Args:
        spill: the file; the queue closes it.
        owner: object whose end closes the queue.

    Attributes:
        pid: id of the process.
        spill: the file.
    """

    def __init__(self, spill: SpillFile, owner: object) -> None:
        self.pid, self.spill = os.getpid(), spill
        self._jobs: queue.SimpleQueue[SpillJob | weakref.ref[object] | None] = queue.SimpleQueue()
        self._owner = weakref.ref(owner, self._jobs.put)  # implemented in C: no exception can interrupt it
        self._records = Records(self._restore, self._jobs.put)
        self._discarded: deque[tuple[Record, SpillJob | None]] = deque()
        self._lock = threading.RLock()  # guards this object's state and the blocks of the spill file
        self._closing = self._stopped = False
        self._thread: threading.Thread | None = None
        self._starts_from = 0.0  # time from which a thread may be started
        self._working = threading.Lock()  # held by the thread that carries out transfers...
        self._worker: int | None = None  # ...and its id
        self._running: list[SpillJob] = []  # several if the handler of a signal has transfers of its own

    @property
    def copies(self) -> int:
        """Number of copies."""
        return len(self._records)

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """Prepare the spill file; see `Transfers.prepare`."""
        with self._lock:
            self._sweep()
            with self._records.changing():
                self.spill.prepare(placement.lower_bytes, gives_back=gives_back)

    def make_copy(self, nbytes: int, at: int | None) -> SpillCopy:
        """Return a copy with a block that is not written yet.

        Raises:
            TierFull: the file has no room.
            TransferFailed: the queue is closed, or the file cannot grow.
        """
        copy = SpillCopy(nbytes, self)
        with self._lock:
            if self._stopped:
                raise TransferFailed("the spill file is closed")
            self._sweep()  # discarded copies may occupy the planned offset
            record = self._records.reserve(copy, lambda: self.spill.reserve(nbytes, at))
            copy.record, copy.offset = record, record.block
        return copy

    def submit(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage, extents: Extents) -> SpillJob:
        """Begin a transfer of parts of a copy."""
        job = SpillJob(copy, is_out, storage, extents)
        self._jobs.put(job)
        copy.last = job
        self._start(job)
        return job

    def wait(self, job: SpillJob | None) -> None:
        """Return when a transfer has ended.

        Raises:
            TransferFailed: the interpreter is shutting down; or this is the handler of a signal that came in the middle
                of that transfer, or of one of the same copy.
        """
        if threading.current_thread() is self._thread:
            return  # a destructor runs in the queue's thread; the job keeps the storage alive until it has ended
        while job is not None and not job.is_done:
            if self.is_own_thread():
                if any(each.is_of_copy_of(job) for each in self._running):
                    raise TransferFailed("a signal handler cannot use what is being moved in the code it interrupts")
                self._take()
            elif job.ended.acquire(timeout=CHECK_SECONDS):
                job.ended.release()  # other waiters need it, too
            elif sys.is_finalizing():
                raise TransferFailed("the interpreter is shutting down, and its threads have stopped")
            else:
                self._start(job)

    def discard(self, copy: SpillCopy) -> None:
        """Free the copy's block as soon as its last transfer has ended."""
        record = copy.record
        if record is not None:
            self._discarded.append((record, copy.last))
            copy.record = None
        self.settle()

    def close(self) -> None:
        """Stop once the last copy is discarded."""
        self._closing = True
        self.settle()

    def settle(self) -> None:
        """Free discarded copies, and stop if the queue is closing and empty. Callable from any thread at any moment."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._jobs.put(None)  # a destructor runs in the middle of a change: leave it to the thread
            return
        with self._lock:
            is_over = self._tidy()
        if is_over:
            self._jobs.put(None)
            if not self.is_own_thread():
                if self._thread is not None and not sys.is_finalizing():
                    self._thread.join()
                self.spill.close()  # if the thread never ran, or has died

    def is_own_thread(self) -> bool:
        """Tell whether the caller is the thread that carries out transfers."""
        return threading.get_ident() == self._worker

    # With the lock ----------------------------------------------------------------------------------------------

    def _tidy(self) -> bool:
        """Free discarded copies. Returns whether the queue is closing and empty."""
        self._sweep()
        if self._closing or self._owner() is None:
            for record in self._records.list_lost():
                self._free(record)  # the thread may never have run
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

    def _start(self, job: SpillJob) -> None:
        """Have a thread carry out a transfer that was enqueued. Do so here if none runs and none can be started."""
        if self._working.locked():
            return
        if not self._start_thread():
            self._work(job)
            if (error := job.error) is not None and not isinstance(error, Exception):
                raise type(error)(*error.args) from None  # Ctrl-C; not the error itself, which would refer to itself

    def _start_thread(self) -> bool:
        """Start the thread. Return False if none can be started, or if that has just taken long in vain."""
        begin = time.monotonic()
        if begin < self._starts_from:
            return False
        try:
            start_thread(threading.Thread(target=self._work, name="elbowroom-transfers", daemon=True))
        except RuntimeError:
            end = time.monotonic()
            self._starts_from = end + WAITS * (end - begin)
            return False
        return True

    def _work(self, last: SpillJob | None = None) -> None:
        """Carry out transfers, in a thread of its own or up to `last`."""
        if not self._working.acquire(blocking=False):
            return  # another thread was started meanwhile
        try:
            self._worker = threading.get_ident()
            if last is None:
                self._thread = threading.current_thread()
            is_over = False
            while not is_over and (last is None or not last.is_done):
                is_over = self._take()
            if is_over:
                self.spill.close()
        finally:
            self._worker = None
            self._working.release()

    def _take(self) -> bool:
        """Run the next job. Returns whether it was the last."""
        job = self._jobs.get()
        try:
            if isinstance(job, SpillJob):
                self._running.append(job)
                try:
                    job.run(self.spill)
                finally:
                    self._running.pop()
            with self._lock:
                if isinstance(job, Record):  # the copy was garbage-collected
                    self._free(job)
                job = None
                return self._tidy()
        except Exception as error:  # out of memory, for example: this thread must go on
            if isinstance(job, SpillJob):
                job.fail(error)  # somebody may wait for it
            time.sleep(RETRY_SECONDS)
            self._jobs.put(None)
            return False
