"""Protocol of transfers, and its implementation for a CPU: a thread with a queue."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from elbowroom.errors import InternalError, TierFull, TransferFailed
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.ir.timeline import Activity, Lane
from elbowroom.native import library
from elbowroom.runtime.compute_streams import MeetingStreams, NoStreams
from elbowroom.runtime.copies import Copy, Extents
from elbowroom.runtime.spill_queue import SpillCopy, SpillJob, SpillQueue
from elbowroom.tiers.disk import SpillFile

T = TypeVar("T")

MOST_ACTIVITIES = 100_000
"""Limit on the transfers, and on the waits, that are remembered for `list_activities`."""

Finish = Callable[[], None]
"""Makes later compute wait for a transfer."""


class Transfers(Protocol):
    """Moves storages between the device and the tier below.

    Transfers follow program order: a copy contains everything computed before `offload`, and compute after `finish`
    sees the transfer complete.

    Attributes:
        give_up: called when the tier has no room; gives up copies that can be made again, and returns whether there
            were any.
        offloaded_bytes, reloaded_bytes: of all transfers begun since figures were reset.
    """

    give_up: Callable[[], bool]
    offloaded_bytes: int
    reloaded_bytes: int

    @property
    def streams(self) -> MeetingStreams:
        """Streams of the device."""
        ...

    @property
    def stall_seconds(self) -> float:
        """Seconds that the host waited for transfers."""
        ...

    def reset_figures(self) -> None:
        """Start counting seconds and bytes from zero."""
        ...

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """Prepare the tier for the placement of the next step's copies.

        Called between steps. Existing copies stay where they are.

        Args:
            gives_back: whether to return memory and disk space beyond the placement to the system.
        """
        ...

    def offload(self, storage: torch.UntypedStorage, copy_slot: CopySlot | None = None) -> Copy:
        """Begin to offload a storage. The caller keeps it alive until `finish`.

        Args:
            copy_slot: planned slot of the copy. If it is taken, the copy goes elsewhere.

        Raises:
            TierFull: the tier has no room; nothing was begun.
            TransferFailed: the transfer could not be begun.
        """
        ...

    def reload(self, copy: Copy, misalignment: int = 0) -> torch.UntypedStorage:
        """Allocate a storage on the device and begin to copy into it. The copy stays valid.

        Args:
            misalignment: bytes between an aligned address and that of the storage, on a CPU.

        Raises:
            TransferFailed: the device is out of memory, or a parent process made the copy.
        """
        ...

    def make_copy(self, nbytes: int) -> Copy:
        """Reserve a copy without contents, which are written in sections.

        Raises:
            TierFull, TransferFailed: as for `offload`.
        """
        ...

    def move_section(self, copy: Copy, section: torch.UntypedStorage, extents: Extents, *, is_out: bool) -> Finish:
        """Begin to write a section into a copy, or to read it after all that was written before.

        `section` is kept alive until the transfer is over.

        Returns:
            A function that makes later compute wait for the transfer. It raises TransferFailed if that failed.
        """
        ...

    def finish(self, copy: Copy) -> None:
        """Make later compute wait for the copy's last transfer.

        Raises:
            TransferFailed: the transfer failed. After an offload the storage is intact.
        """
        ...

    def discard(self, copy: Copy) -> None:
        """Free the copy's block."""
        ...

    def close(self) -> None:
        """Stop once the last copy is discarded; until then copies can be reloaded."""
        ...


class ThreadTransfers:
    """Moves storages of the CPU to a spill file and back, on one thread, first in first out.

    A forked process opens its own file and starts its own thread with its first transfer. It cannot reload its parent's
    copies.
    """

    streams = NoStreams()

    def __init__(self, spill: SpillFile) -> None:
        self._first = spill
        self._queues = {os.getpid(): SpillQueue(spill, self)}  # by process id: a parent's queue has no thread here
        self._closed = False
        self.give_up: Callable[[], bool] = lambda: False
        self.reset_figures()

    def reset_figures(self) -> None:
        self.stall_seconds = 0.0
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self._jobs = deque[SpillJob](maxlen=MOST_ACTIVITIES)
        self._waits = deque[Activity](maxlen=MOST_ACTIVITIES)

    def list_activities(self) -> list[Activity]:
        """Return transfers that have ended, and waits, since figures were reset, in seconds of `time.perf_counter`."""
        moved = [
            Activity(Lane.OFFLOAD if job.is_out else Lane.RELOAD, job.subject, job.begin, job.end)
            for job in self._jobs
            if job.is_done
        ]
        return [*moved, *self._waits]

    @property
    def _queue(self) -> SpillQueue:
        """Queue of this process."""
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
        copy = self._make_copy(storage.nbytes(), None if copy_slot is None else copy_slot.offset)
        try:
            self._submit(copy, True, storage)
        except TransferFailed:
            copy.queue.discard(copy)
            raise
        self.offloaded_bytes += copy.nbytes
        return copy

    def reload(self, copy: Copy, misalignment: int = 0) -> torch.UntypedStorage:
        assert isinstance(copy, SpillCopy)
        check_process(copy.queue.pid, copy.nbytes)
        if copy.record is None:
            raise InternalError("a reload of a discarded copy was requested")
        try:
            storage: torch.UntypedStorage
            if misalignment:
                storage = library.load().allocate(copy.nbytes, misalignment)
            else:
                storage = torch.empty(copy.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        except RuntimeError as error:
            raise TransferFailed(f"there is no memory to reload {copy.nbytes} bytes: {error}") from error
        self._submit(copy, False, storage)
        self.reloaded_bytes += copy.nbytes
        return storage

    def make_copy(self, nbytes: int) -> SpillCopy:
        return self._make_copy(nbytes, None)

    def _make_copy(self, nbytes: int, at: int | None) -> SpillCopy:
        queue = self._queue
        return retry_when_full(lambda: queue.make_copy(nbytes, at), self.give_up)

    def move_section(self, copy: Copy, section: torch.UntypedStorage, extents: Extents, *, is_out: bool) -> Finish:
        assert isinstance(copy, SpillCopy)
        check_process(copy.queue.pid, copy.nbytes)
        nbytes = extents.nbytes
        if is_out:
            self.offloaded_bytes += nbytes
        else:
            self.reloaded_bytes += nbytes
        job = copy.queue.submit(copy, is_out, section, extents)
        self._jobs.append(job)

        def finish() -> None:
            self._wait(job)
            self._check(job.error, nbytes)

        return finish

    def _submit(self, copy: SpillCopy, is_out: bool, storage: torch.UntypedStorage) -> None:
        self._jobs.append(copy.queue.submit(copy, is_out, storage, Extents(0, 0, copy.nbytes)))

    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        check_process(copy.queue.pid, copy.nbytes)
        if copy.last is not None:
            self._wait(copy.last)
            self._check(copy.error or copy.last.error, copy.nbytes)

    def _wait(self, job: SpillJob) -> None:
        if not job.is_done:
            begin = time.perf_counter()
            job.queue.wait(job)
            end = time.perf_counter()
            self.stall_seconds += end - begin
            self._waits.append(Activity(Lane.STALL, job.subject, begin, end))

    def _check(self, error: BaseException | None, nbytes: int) -> None:
        if error is not None:
            raise TransferFailed(
                f"moving {nbytes} bytes to or from the spill file in {self._first.folder} failed: {error}"
            ) from error

    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, SpillCopy)
        if copy.queue.pid != os.getpid():
            return  # the file and the block belong to the parent
        if copy.record is not None and not copy.queue.is_own_thread():  # else a destructor runs in a transfer
            copy.queue.wait(copy.last)  # the block must not be reused while the thread writes to it
        copy.queue.discard(copy)

    def close(self) -> None:
        self._closed = True
        self._forget_parents()
        for queue in list(self._queues.values()):
            queue.close()


def retry_when_full(reserve: Callable[[], T], give_up: Callable[[], bool]) -> T:
    """Reserve room in a tier, again whenever it had none and copies were given up.

    Raises:
        TierFull: there is no room, and nothing more to give up.
    """
    while True:
        try:
            return reserve()
        except TierFull:
            if not give_up():
                raise


def check_process(pid: int, nbytes: int) -> None:
    """Check that this process made a copy.

    Raises:
        TransferFailed: another process (`pid`) made it.
    """
    if pid != os.getpid():
        raise TransferFailed(
            f"{nbytes} bytes were offloaded by process {pid}, before this process was forked from it, and cannot be "
            "brought back here: call room.detach() before the fork, or begin the process by spawn; and run a backward "
            "pass in the process that ran the forward pass"
        )
