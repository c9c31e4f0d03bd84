"""What the engine asks of whatever moves bytes, and the one for a CPU: a thread with its own queue."""

from __future__ import annotations

import queue
import threading
import time
from typing import Protocol

import torch

from elbowroom.errors import TransferFailed
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

    def offload(self, storage: torch.UntypedStorage) -> Copy:
        """Begin copying a storage down. The caller keeps it alive until `finish`.

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


class ThreadTransfers:
    """Moves storages of the CPU to a spill file and back, on one thread of its own, first come first served."""

    def __init__(self, spill: SpillFile) -> None:
        self._spill = spill
        self._jobs: queue.SimpleQueue[tuple[SpillCopy, threading.Event, bool, int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._copies = 0
        self._closing = False
        self.stall_seconds = 0.0
        self.offloaded_bytes = self.reloaded_bytes = 0

    def offload(self, storage: torch.UntypedStorage) -> SpillCopy:
        nbytes = storage.nbytes()
        copy = SpillCopy(self._spill.reserve(nbytes), nbytes)
        self._copies += 1
        self.offloaded_bytes += nbytes
        self._submit(copy, True, storage.data_ptr())
        return copy

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        assert isinstance(copy, SpillCopy)
        storage = torch.empty(copy.nbytes, dtype=torch.uint8).untyped_storage()
        self.reloaded_bytes += copy.nbytes
        copy.done = threading.Event()
        self._submit(copy, False, storage.data_ptr())
        return storage

    def _submit(self, copy: SpillCopy, is_out: bool, address: int) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="elbowroom-transfers", daemon=True)
            self._thread.start()
        # The event goes along: a reload begun before the offload has ended gives the copy a new one.
        self._jobs.put((copy, copy.done, is_out, address))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copy, done, is_out, address = job
            try:
                (self._spill.write if is_out else self._spill.read)(copy.offset, address, copy.nbytes)
            except Exception as error:  # whatever it is, it belongs to whoever waits: this thread must go on
                copy.error = error
            done.set()
            del job, copy, done

    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        if not copy.done.is_set():
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
        copy.done.wait()  # the block may not be given to another while the thread writes to it
        self._spill.free(copy.offset, copy.nbytes)
        self._copies -= 1
        if self._closing and self._copies == 0:
            self._stop()

    def close(self) -> None:
        self._closing = True
        if self._copies == 0:
            self._stop()

    def _stop(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        self._spill.close()
