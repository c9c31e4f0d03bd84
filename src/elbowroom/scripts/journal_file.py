"""Writes the journal of a running script to a file, so that it is kept however the script ends."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Mapping

from elbowroom._folders import check_writable
from elbowroom.ir.files import save
from elbowroom.ir.journal import Journal
from elbowroom.room import Room

SECONDS_BETWEEN_WRITES = 5.0
"""A process that is killed loses the records of so many seconds at most."""


class JournalFile:
    """The journal files of one process: one for each room, in the order in which they were made.

    Args:
        path: of the first room's journal. Later ones get a number, and so does each process of a distributed job, or
            that the script forks.

    Raises:
        UsageError: it cannot be written.
    """

    def __init__(self, path: pathlib.Path, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        is_distributed = int(environment.get("WORLD_SIZE") or 1) > 1
        self._rank = f"rank{environment.get('RANK', '0')}" if is_distributed else ""
        check_writable(path)
        self._path = path
        self._pid = os.getpid()
        self._rooms = 0
        self._written = float("-inf")

    @property
    def path(self) -> pathlib.Path:
        """File of the latest room."""
        path = self._path if self._rooms <= 1 else _mark(self._path, str(self._rooms))
        marks = [self._rank] if self._rank else []
        if os.getpid() != self._pid:  # a process that the script has forked
            marks.append(f"pid{os.getpid()}")
        return _mark(path, ".".join(marks)) if marks else path

    def begin_room(self) -> None:
        """Write to another file from now on."""
        self._rooms += 1
        self._written = float("-inf")

    def is_due(self) -> bool:
        """Tell whether the journal was last written some seconds ago."""
        return time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES

    def write(self, journal: Journal) -> None:
        """Replace the file by a journal, which takes little time."""
        save(journal, self.path)
        self._written = time.monotonic()

    def finish(self, room: Room) -> None:
        """Replace the file by the journal of a room that has ended, and its planned step, for `elbowroom view`."""
        room.save_run(self.path)


def _mark(path: pathlib.Path, mark: str) -> pathlib.Path:
    stem, dot, suffix = path.name.partition(".")
    return path.with_name(f"{stem}.{mark}{dot}{suffix}")
