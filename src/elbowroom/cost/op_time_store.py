"""Files of measured op times, one for each machine, in the user's cache.

A file may be deleted at any time. One that cannot be read counts as empty, and is replaced by the next measurement.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Iterator, Mapping

from elbowroom._folders import find_cache, make_cache
from elbowroom.cost.op_times import MOST_KINDS, merge
from elbowroom.errors import TraceError, UsageError
from elbowroom.ir import files
from elbowroom.ir.op_times import OpTime, OpTimes

logger = logging.getLogger(__name__)

MOST_FILES = 16
"""Files kept: of other machines that share the cache, and of other versions of PyTorch or numbers of threads."""

LOCK_SECONDS = 2.0
"""Longest wait for another process that writes the file; after that the measurement is not stored."""


class OpTimeStore:
    """The stored op times of one machine.

    Args:
        machine: as in `OpTimes`.
        folder: of the files; in the user's cache by default.
    """

    def __init__(self, machine: str, folder: pathlib.Path | None = None) -> None:
        self._machine = machine
        self._folder = find_cache() / "op_times" if folder is None else folder
        self.path = self._folder / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"

    def load(self) -> dict[str, float]:
        """Return the seconds of each kind of op; none if there is no file, or it cannot be used."""
        return {each.key: each.seconds for each in self._read()}

    def add(self, latest: Mapping[str, float]) -> None:
        """Update the file by the times of one measured step. If that is impossible, the times are lost.

        The file is replaced as a whole; concurrent processes take turns.
        """
        if not latest:
            return
        try:
            make_cache(self._folder)
            with self._locking():
                files.save(OpTimes(machine=self._machine, times=merge(self._read(), latest)), self.path)
                self._delete_old_files()
        except (OSError, UsageError, TraceError) as error:
            logger.info("measured op times are not stored: %s", error)

    def _read(self) -> tuple[OpTime, ...]:
        try:
            found = files.load(OpTimes, self.path)
        except (UsageError, TraceError) as error:
            logger.debug("no stored op times: %s", error)
            return ()
        if found.machine != self._machine:
            return ()
        return tuple(each for each in found.times if each.seconds > 0 and each.steps > 0)[-MOST_KINDS:]

    @contextlib.contextmanager
    def _locking(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_SECONDS
        with open(self._folder / "lock", "w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released with the file
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            yield

    def _delete_old_files(self) -> None:
        found = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[MOST_FILES:]:
            os.unlink(path)
