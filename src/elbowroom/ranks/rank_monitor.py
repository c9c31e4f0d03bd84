"""Tells the other ranks that this one lives, or why it failed; and ends a job that waits for a rank that is gone.

Collectives of PyTorch wait for half an hour by default, and do not say for whom. Each rank writes a sign of life to the
default group's store, and reads that of the next rank.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elbowroom.ranks.agreement import Greeting
from elbowroom.ranks.rank_group import RankGroup

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Time between two signs of life."""

GRACE_SECONDS = 5.0
"""How long a step may take to notice by itself that a rank is gone, before this process ends."""

LEFT = "left"
"""Sign of a rank that needs no other any more."""

EXIT_CODE = 1


class RankMonitor:
    """Watches the other ranks in a thread, from its making until `close`.

    Args:
        group: of the job.
        greetings: of its ranks.
        describe: tells what this rank does, in a few words.
    """

    def __init__(self, group: RankGroup, greetings: Sequence[Greeting], describe: Callable[[], str]) -> None:
        self._group = group
        self._greetings = greetings
        self._describe = describe
        # A store serves one call at a time: the program may wait in the other one.
        self._store: Any = group.store.clone() if hasattr(group.store, "clone") else group.store
        self._failed_key = f"{group.prefix}/failed"
        self._has_failed = False
        self._is_closed = threading.Event()
        self.is_waiting = False
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="elbowroom-ranks", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def note_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails. The first failure of a job counts."""
        self._has_failed = True
        text = f"rank {self._group.rank}: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._failed_key, "", text[:4000])

    def find_cause(self) -> str:
        """Return which other rank has failed or ended, and why; "" if none is known to."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._failed_key]):
                text = self._store.get(self._failed_key).decode(errors="replace")
                if not text.startswith(f"rank {self._group.rank}:"):
                    return str(text)
        return self._find_ended()

    def close(self) -> None:
        """Stop watching. The others go on without this rank."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self._leave)
        if not self._has_failed:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._name_beat(self._group.rank), LEFT)

    def _leave(self) -> None:
        """End with the program."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._has_failed:
            self.note_failure(error)
        self.close()

    def _watch(self) -> None:
        next_rank = (self._group.rank + 1) % self._group.size
        last, heard = "", time.monotonic()
        while not self._is_closed.wait(BEAT_SECONDS):
            try:
                self._beat()
                failure = self.find_cause() if self._store.check([self._failed_key]) else ""
                key = self._name_beat(next_rank)
                beat = self._store.get(key).decode() if self._store.check([key]) else ""
            except RuntimeError as error:
                logger.debug("the store of the process group is gone: %s", error)
                return
            if beat != last or beat == LEFT:
                last, heard = beat, time.monotonic()
            silent_seconds = time.monotonic() - heard
            if not failure and silent_seconds > self._group.timeout_seconds:
                failure = f"rank {next_rank} gives no sign of life for {silent_seconds:.0f} s; its last: {last}"
            if failure and self.is_waiting:
                self._end_job(failure)
                return

    def _end_job(self, failure: str) -> None:
        """End a step that waits for a rank that will not come."""
        # Once a step has an error, the program handles it.
        for _ in range(int(GRACE_SECONDS / 0.1)):
            if not self.is_waiting or self._is_closed.wait(0.1):
                return
        # Not by `logger`: a program may send that elsewhere, and this process ends.
        text = f"elbowroom: rank {self._group.rank} ends ({self._describe()}), as it waits for another one: {failure}"
        print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._name_beat(self._group.rank), f"{self._beats}, {self._describe()}")

    def _name_beat(self, rank: int) -> str:
        return f"{self._group.prefix}/beat/{rank}"

    def _find_ended(self) -> str:
        """Return which rank on this machine has ended; "" if none."""
        own = self._greetings[self._group.rank]
        for rank, each in enumerate(self._greetings):
            if each.host == own.host and rank != self._group.rank and has_ended(each.process):
                return f"rank {rank} (process {each.process}) has ended{self._describe_last(rank)}"
        return ""

    def _describe_last(self, rank: int) -> str:
        with contextlib.suppress(RuntimeError):
            key = self._name_beat(rank)
            if self._store.check([key]):
                return f"; its last sign of life: {self._store.get(key).decode()}"
        return ""


def has_ended(process: int) -> bool:
    """Tell whether a process of this machine has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return True
    except OSError:
        return False
