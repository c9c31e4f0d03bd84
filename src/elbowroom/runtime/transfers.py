"""What the engine asks of whatever moves bytes, and the one for a CPU: a thread with its own queue."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Protocol

import torch

from elbowroom.errors import TransferFailed
from elbowroom.ir.placement import Berth, Placement
from elbowroom.tiers.disk import SpillFile


class Copy(Protocol):
    """The contents of a storage in the tier below, and the state of its last transfer."""

    nbytes: int


class Transfers(Protocol):
    """Moves storages between the device and the tier below.

    The order that matters is the program's: what it computed before `offload` is in the copy, and what it computes
    after `finish` finds the transfer done.
    """

    stall_seconds: float
    offloaded_bytes: int
    reloaded_bytes: int

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """The next step's copies are laid out like this; `gives_back`: no others are expected to need more room.

        To be called between steps. Copies that are there stay where they are.
        """
        ...

    def offload(self, storage: torch.UntypedStorage, berth: Berth | None = None) -> Copy:
        """Begin copying a storage down. The caller keeps it alive until `finish`.

        Args:
            berth: where the copy was planned to lie. What is there already only costs room: it lies elsewhere then.

        Raises:
            TierFull: there is no room; nothing was begun.
        """
        ...

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        """Make room on the device and begin copying back. The copy stays valid.

        Raises:
            TransferFailed: no memory.
        """
        ...

    def finish(self, copy: Copy) -> None:
        """Make what follows come after the copy's last transfer.

        Raises:
            TransferFailed: it did not complete. After an offload the storage is intact.
        """
        ...

    def discard(self, copy: Copy) -> None:
        """Give the copy's room back."""
        ...

    def close(self) -> None:
        """Stop, once the last copy is discarded; until then copies can still be reloaded."""
        ...


class SpillCopy:
    """A storage's block in the spill file."""

    __slots__ = ("done", "error", "nbytes", "offset")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.done = threading.Event()
        self.error: Exception | None = None


_Job = tuple[SpillCopy, threading.Event, bool, torch.UntypedStorage]
"""Which copy, what tells of its end, whether it goes out, and the storage on the device."""


class ThreadTransfers:
    """Moves storages of the CPU to a spill file and back, on one thread of its own, first come first served."""

    def __init__(self, spill: SpillFile) -> None:
        self._spill = spill
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._discarded: deque[SpillCopy] = deque()
        self._lock = threading.Lock()  # of what follows, and of the blocks of the spill file
        self._copies = 0
        self._closing = self._stopped = False
        self.stall_seconds = 0.0
        self.offloaded_bytes = self.reloaded_bytes = 0

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        with self._lock:
            self._free_discarded()
            self._spill.prepare(placement.lower_bytes, gives_back=gives_back)

    def offload(self, storage: torch.UntypedStorage, berth: Berth | None = None) -> SpillCopy:
        nbytes = storage.nbytes()
        with self._lock:
            if self._stopped:
                raise TransferFailed("the spill file is closed")
            self._free_discarded()  # what could not be swept in time would be in the way of what is planned to be there
            copy = SpillCopy(self._spill.reserve(nbytes, None if berth is None else berth.offset), nbytes)
            self._copies += 1
        self.offloaded_bytes += nbytes
        self._submit(copy, True, storage)
        return copy

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        assert isinstance(copy, SpillCopy)
        try:
            storage = torch.empty(copy.nbytes, dtype=torch.uint8).untyped_storage()
        except RuntimeError as error:
            raise TransferFailed(f"there is no memory to bring {copy.nbytes} bytes back into: {error}") from error
        self.reloaded_bytes += copy.nbytes
        copy.done = threading.Event()
        self._submit(copy, False, storage)
        return storage

    def _submit(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="elbowroom-transfers", daemon=True)
            self._thread.start()
        # The event goes along: a reload begun before the offload has ended gives the copy a new one.
        # So does the storage, which must outlive the transfer even where an exception stops whoever would wait for it.
        self._jobs.put((copy, copy.done, is_out, storage))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, done, is_out, storage = job
            try:
                (self._spill.write if is_out else self._spill.read)(copy.offset, storage.data_ptr(), copy.nbytes)
            except Exception as error:  # whatever it is, it belongs to whoever waits: this thread must go on
                copy.error = error
            del job, storage  # before anyone counts on its being free
            done.set()
            del copy, done
            self._sweep()

    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        if not copy.done.is_set():
            if self._is_own_thread():
                return  # the garbage collector is freeing something here; the job holds the storage until it is done
            begin = time.perf_counter()
            copy.done.wait()
            self.stall_seconds += time.perf_counter() - begin
        if copy.error is not None:
            error, copy.error = copy.error, None
            raise TransferFailed(
                f"moving {copy.nbytes} bytes to or from the spill file in {self._spill.folder} failed: {error}"
            ) from error

    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        if not self._is_own_thread():
            copy.done.wait()  # the block may not be given to another while the thread writes to it
        self._discarded.append(copy)
        self._sweep()

    def _sweep(self) -> None:
        """Give back the blocks of what was discarded. Called by whatever thread and at whatever moment."""
        if not self._lock.acquire(blocking=False):
            return  # a job is about to be submitted, and it is done again after that
        try:
            self._free_discarded()
            stop = self._closing and self._copies == 0 and not self._stopped
            self._stopped |= stop
        finally:
            self._lock.release()
        if stop:
            self._stop()

    def _free_discarded(self) -> None:
        for _ in range(len(self._discarded)):
            copy = self._discarded.popleft()
            if copy.done.is_set():
                self._spill.free(copy.offset, copy.nbytes)
                self._copies -= 1
            else:
                self._discarded.append(copy)

    def close(self) -> None:
        self._closing = True
        self._sweep()

    def _stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            if not self._is_own_thread():
                self._thread.join()
            self._thread = None
        self._spill.close()

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread
