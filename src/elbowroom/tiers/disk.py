"""Spill file without a name, so that the system deletes it however the process ends."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import resource
import tempfile
from collections.abc import Iterable, Sequence

from elbowroom._folders import find_temporary
from elbowroom.errors import TierFull, TransferFailed, UsageError
from elbowroom.layout.free_list import ALIGNMENT_BYTES, FreeList
from elbowroom.native import library

NAME = "the spill file"

ADVICE = {
    errno.ENOSPC: "Free some disk space, or pass spill_folder= a folder on a larger disk.",
    errno.EDQUOT: "Raise the quota of the disk, or pass spill_folder= a folder on another one.",
    errno.EFBIG: "Raise the limit on the size of files (`ulimit -f`).",
}
"""What to do if the file cannot grow, by error number."""

Dimensions = Sequence[tuple[int, int, int]]

logger = logging.getLogger(__name__)


def raise_foreign(error: OSError) -> None:
    """Raise an error again that no system call has made, such as the TimeoutError of a signal's handler."""
    if error.errno is None:
        raise error


class SpillFile:
    """Blocks in an unlinked temporary file.

    Args:
        folder: folder of the file; the system's temporary folder if None.
        capacity_bytes: limit on the file's size; None for no limit but the disk's.

    Attributes:
        file_bytes: current size of the file.

    Raises:
        UsageError: the folder is missing or not writable.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, capacity_bytes: int | None = None) -> None:
        self.folder = os.fspath(folder) if folder is not None else find_temporary()
        try:
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="elbowroom-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise_foreign(error)
            raise UsageError(
                f"cannot spill to {self.folder}: {error.strerror or error}; pass spill_folder= a writable folder"
            ) from error
        self._pid, self._capacity = os.getpid(), capacity_bytes
        self._free = FreeList(capacity_bytes)
        self._planned_bytes = self.file_bytes = 0

    def open_another(self) -> SpillFile:
        """Return a new file with the same folder and capacity, for a forked process.

        Raises:
            UsageError: as for the first.
        """
        return SpillFile(self.folder, self._capacity)

    def reserve(self, nbytes: int, at: int | None = None) -> int:
        """Reserve a block and return its offset.

        Args:
            at: planned offset. If it is taken, the block goes behind all planned ones.

        Raises:
            TierFull: the capacity or the disk is used up.
        """
        offset = self._take(nbytes, at)
        if offset is None:
            advice = "Give it more with host_bytes= or another spill_folder=."
            raise TierFull(f"{NAME} in {self.folder}", nbytes, self._free.free_bytes or 0, advice)
        if offset + nbytes > self.file_bytes:
            try:
                self._grow(offset, nbytes)
            except TierFull:
                if at is None:
                    raise
                return self.reserve(nbytes)  # the file may have a free block at a lower offset
        return offset

    def _take(self, nbytes: int, at: int | None) -> int | None:
        if at is None:
            return self._free.take(nbytes)
        if self._free.take_at(at, nbytes):
            return at
        offset = self._free.take(nbytes, self._planned_bytes)
        return self._free.take(nbytes) if offset is None else offset

    def _grow(self, offset: int, nbytes: int) -> None:
        # Allocate the disk blocks now, so that a full disk is noticed before anything is written.
        end = offset + nbytes
        try:
            os.posix_fallocate(self._file.fileno(), self.file_bytes, end - self.file_bytes)
        except OSError as error:
            self._free.give(offset, nbytes)
            raise_foreign(error)
            if error.errno not in ADVICE:
                raise TransferFailed(f"{NAME} in {self.folder} cannot grow: {error.strerror}") from error
            free_bytes = self._count_free(error.errno)
            raise TierFull(f"{NAME} in {self.folder}", nbytes, free_bytes, ADVICE[error.errno]) from error
        self.file_bytes = end

    def _count_free(self, why: int) -> int:
        """Return the bytes by which the file might have grown. `why`: error number of its refusal."""
        if why == errno.EDQUOT:
            return 0  # what the quota leaves is not known
        if why == errno.EFBIG:
            return max(0, resource.getrlimit(resource.RLIMIT_FSIZE)[0] - self.file_bytes)
        status = os.fstatvfs(self._file.fileno())  # the folder may have been renamed
        return status.f_bavail * status.f_frsize

    def free(self, offset: int, nbytes: int) -> None:
        """Free a block."""
        self._free.give(offset, nbytes)

    def restore(self, taken: Iterable[tuple[int, int]]) -> None:
        """Rebuild the free list after an exception interrupted a change. `taken`: (offset, bytes) of each used
        block."""
        self._free.restore(taken)
        self.file_bytes = os.fstat(self._file.fileno()).st_size

    def prepare(self, planned_bytes: int, *, gives_back: bool) -> None:
        """Prepare for reservations with offsets below `planned_bytes`.

        Args:
            gives_back: whether to truncate the file behind them, except for blocks used since the last call.
        """
        self._planned_bytes = -(-planned_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if not gives_back:
            return
        least = max(self._planned_bytes, self._free.forget_end())
        if self.file_bytes > least:
            try:
                os.ftruncate(self._file.fileno(), least)
            except OSError as error:
                raise_foreign(error)
                logger.warning("%s in %s could not be truncated: %s", NAME, self.folder, error)
            else:
                self.file_bytes = least

    def write(self, offset: int, address: int, nbytes: int, dimensions: Dimensions = ()) -> None:
        """Copy bytes from memory into a block. Releases the GIL meanwhile.

        Args:
            dimensions: of runs of `nbytes` each: how many there are along it, and their distances in the block and in
                memory; the outermost first. What lies between close runs is read and written again.

        Raises:
            OSError: the write failed.
        """
        if dimensions:
            library.load().write_runs(self._file.fileno(), offset, address, nbytes, dimensions)
            return
        done = 0
        memory = memoryview((ctypes.c_char * nbytes).from_address(address))
        while done < nbytes:
            done += os.pwrite(self._file.fileno(), memory[done:], offset + done)

    def read(self, offset: int, address: int, nbytes: int, dimensions: Dimensions = ()) -> None:
        """Copy a block's bytes into memory. Releases the GIL meanwhile.

        Args:
            dimensions: as for `write`.

        Raises:
            OSError: the read failed.
        """
        if dimensions:
            library.load().read_runs(self._file.fileno(), offset, address, nbytes, dimensions)
            return
        done = 0
        memory = memoryview((ctypes.c_char * nbytes).from_address(address))
        while done < nbytes:
            got = os.preadv(self._file.fileno(), [memory[done:]], offset + done)
            if got == 0:
                raise OSError(errno.EIO, "the spill file is shorter than what was written to it")
            done += got

    @property
    def is_empty(self) -> bool:
        """Tell whether every block has been freed."""
        return self._free.is_empty

    def close(self) -> None:
        """Truncate and close the file. A forked process only closes it."""
        if not self._file.closed:
            try:
                if self._pid == os.getpid():
                    os.ftruncate(self._file.fileno(), 0)  # frees the disk even if a forked process has it open
            except OSError as error:
                raise_foreign(error)
                logger.warning("%s in %s could not be truncated before it was closed: %s", NAME, self.folder, error)
            finally:
                self._file.close()
