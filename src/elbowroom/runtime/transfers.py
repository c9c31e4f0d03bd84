"""The protocol of transfers, and its implementation for a CPU: a thread with a queue."""

from __future__ import annotations

import os
import time
from typing import Protocol

import torch

from elbowroom.errors import InternalError, TransferFailed
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.spill_queue import SpillCopy, SpillQueue
from elbowroom.tiers.disk import SpillFile


class Transfers(Protocol):
    """Moves storages between the device and the tier below.

    The order that matters is the program's: what it computed before `offload` is in the copy, and what it computes
    after `finish` finds the transfer done.
    """

    offloaded_bytes: int
    reloaded_bytes: int

    @property
    def stall_seconds(self) -> float:
        """Seconds that the program waited for transfers."""
        ...

    def reset_figures(self) -> None:
        """Start counting seconds and bytes from zero."""
        ...

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """The next step's copies are laid out like this; `gives_back`: no others are expected to need more room.

        To be called between steps. Copies that are there stay where they are.
        """
        ...

    def offload(self, storage: torch.UntypedStorage, copy_slot: CopySlot | None = None) -> Copy:
        """Begin copying a storage down. The caller keeps it alive until `finish`.

        Args:
            copy_slot: where the plan puts the copy. If that place is taken, the copy goes elsewhere.

        Raises:
            TierFull: there is no room; nothing was begun.
            TransferFailed: it could not be begun.
        """
        ...

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        """Make room on the device and begin copying back. The copy stays valid.

        Raises:
            TransferFailed: no memory, or the copy was made by the process that this one was forked from.
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


class ThreadTransfers:
    """Moves storages of the CPU to a spill file and back, on one thread of its own, first come first served.

    A process that is forked from this one shares nothing with it: its first transfer opens a file and starts a thread
    of its own. What its parent has offloaded it cannot bring back.

    Args:
        spill: where to.
    """

    def __init__(self, spill: SpillFile) -> None:
        self._first = spill
        self._queues = {os.getpid(): SpillQueue(spill, self)}  # by process: of a parent's there is only a dead image
        self._closed = False
        self.reset_figures()

    def reset_figures(self) -> None:
        self.stall_seconds = 0.0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0

    @property
    def _queue(self) -> SpillQueue:
        """This process's."""
        pid = os.getpid()
        found = self._queues.get(pid)
        if found is None:
            if self._closed:
                raise TransferFailed("the spill file is closed")
            found = self._queues.setdefault(pid, SpillQueue(self._first.open_another(), self))
            self._forget_parents()
        return found

    @property
    def _spill(self) -> SpillFile:
        return self._queue.spill

    @property
    def _copies(self) -> int:
        return self._queue.copies

    def _forget_parents(self) -> None:
        for pid in [pid for pid in self._queues if pid != os.getpid()]:
            self._queues.pop(pid).spill.close()

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        self._queue.prepare(placement, gives_back=gives_back)

    def offload(self, storage: torch.UntypedStorage, copy_slot: CopySlot | None = None) -> SpillCopy:
        copy = self._queue.make_copy(storage.nbytes(), None if copy_slot is None else copy_slot.offset)
        try:
            self._submit(copy, True, storage)
        except TransferFailed:
            copy.queue.discard(copy)
            raise
        self.offloaded_bytes += copy.nbytes
        return copy

    def reload(self, copy: Copy) -> torch.UntypedStorage:
        assert isinstance(copy, SpillCopy)
        check_process(copy.queue.pid, copy.nbytes)
        if copy.record is None:
            raise InternalError("a copy was to be reloaded after it had been discarded")
        try:
            storage = torch.empty(copy.nbytes, dtype=torch.uint8).untyped_storage()
        except RuntimeError as error:
            raise TransferFailed(f"there is no memory to bring {copy.nbytes} bytes back into: {error}") from error
        self._submit(copy, False, storage)
        self.reloaded_bytes += copy.nbytes
        return storage

    def _submit(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage) -> None:
        copy.queue.submit(copy, is_out, storage)

    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        check_process(copy.queue.pid, copy.nbytes)
        last = copy.last
        assert last is not None
        if not last.is_done:
            begin = time.perf_counter()
            copy.queue.wait(copy)
            self.stall_seconds += time.perf_counter() - begin
        if (error := copy.error or last.error) is not None:
            raise TransferFailed(
                f"moving {copy.nbytes} bytes to or from the spill file in {self._first.folder} failed: {error}"
            ) from error

    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        if copy.queue.pid != os.getpid():
            return  # the file is the parent's, and so is the block
        if copy.record is not None:
            copy.queue.wait(copy)  # the block may not be given to another while the thread writes to it
        copy.queue.discard(copy)

    def close(self) -> None:
        self._closed = True
        self._forget_parents()
        for queue in list(self._queues.values()):
            queue.close()


def check_process(pid: int, nbytes: int) -> None:
    """Refuse what only the process that began it can end.

    Raises:
        TransferFailed: `pid` is of another process.
    """
    if pid != os.getpid():
        raise TransferFailed(
            f"{nbytes} bytes were offloaded by process {pid}, before this process was forked from it, and cannot be "
            "brought back here: fork between steps, and run a backward pass in the process that ran the forward pass"
        )
