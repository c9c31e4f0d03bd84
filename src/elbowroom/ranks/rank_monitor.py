"""Tells the other ranks that this one lives, or why it failed; and ends a job that waits for a rank that is gone.

Collectives of PyTorch wait for half an hour by default, and do not say for whom. Each rank writes a sign of life to the
default group's store, and reads that of the next rank.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elbowroom.ranks.agreement import Greeting
from elbowroom.ranks.process_ends import EXIT_CODE, GRACE_SECONDS, has_ended
from elbowroom.ranks.rank_group import RankGroup
from elbowroom.ranks.thread_activity import ThreadActivity

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Time between two signs of life."""

LEFT = "left"
"""Sign of a rank that needs no other any more."""


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
        self._failure = ""
        self._steps = 0
        self._is_closed = threading.Event()
        self._activity: ThreadActivity | None = None  # of the thread that runs a step
        self._is_stuck = False
        self.is_waiting = False
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="elbowroom-ranks", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def begin_step(self) -> None:
        """Note that this rank may wait for others from now on, and has got over its failure, if there was one."""
        self._steps += 1
        if self._failure:
            with contextlib.suppress(RuntimeError):
                self._store.compare_set(self._failed_key, self._failure, "")
            self._failure = ""
        self._activity = ThreadActivity()
        self.is_waiting = True

    def note_failure(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails. The first failure counts until its rank begins another step."""
        self._publish(f"{type(error).__name__}: {error}")

    def _publish(self, text: str) -> None:
        self._failure = f"{self._steps} {self._group.rank} {text}"[:4000]
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(self._failed_key, "", self._failure)

    def find_cause(self, seconds: float) -> str:
        """Return which other rank has failed in this step or ended, and why; "" if none is known to within a time."""
        deadline = time.monotonic() + seconds
        while not (cause := self._find_failure() or self._find_ended()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return cause

    def _find_failure(self) -> str:
        with contextlib.suppress(RuntimeError, ValueError):
            if self._store.check([self._failed_key]):
                step, rank, text = self._store.get(self._failed_key).decode(errors="replace").split(" ", 2)
                # After a step in which this rank failed, too, it waits for the others as ever.
                if int(rank) != self._group.rank and int(step) >= self._steps:
                    return f"rank {rank}: {text}"
        return ""

    def close(self) -> None:
        """Stop watching. The others go on without this rank."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self._leave)
        if not self._failure:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._name_beat(self._group.rank), LEFT)

    def _leave(self) -> None:
        """End with the program."""
        error = getattr(sys, "last_value", None)
        if error is not None and not self._failure:
            if "gloo" in str(error) and (cause := self.find_cause(GRACE_SECONDS)):  # outside of a step
                print(f"elbowroom: rank {self._group.rank} noticed that {cause}", file=sys.stderr, flush=True)
            self.note_failure(error)
        self.close()

    def _watch(self) -> None:
        next_rank = (self._group.rank + 1) % self._group.size
        last, noticed = "", math.inf
        heard = time.monotonic()
        while not self._is_closed.wait(BEAT_SECONDS):
            try:
                self._beat()
                key = self._name_beat(next_rank)
                beat = self._store.get(key).decode() if self._store.check([key]) else ""
                self._note_stuck()
                stuck = self._find_all_stuck()
            except RuntimeError as error:
                logger.debug("the store of the process group is gone: %s", error)
                return
            now = time.monotonic()
            if beat != last or beat == LEFT:
                last, heard = beat, now
            failure = self._find_failure()
            if not failure and now - heard > self._group.timeout_seconds:
                failure = (
                    f"rank {next_rank} gives no sign of life for {now - heard:.0f} s; its last: {_read_beat(last)}"
                )
            failure = failure or stuck
            # Once a step has an error, the program handles it.
            noticed = min(noticed, now) if failure and self.is_waiting else math.inf
            if now - noticed > GRACE_SECONDS:
                self._end_job(failure)

    def _note_stuck(self) -> None:
        """Tell the others whether this rank waits in a step, and where."""
        activity = self._activity if self.is_waiting else None
        is_stuck = activity is not None and activity.look() > self._group.timeout_seconds
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            place = f"{activity.describe_place()} ({self._describe()})" if is_stuck and activity is not None else ""
            self._store.set(self._name_stuck(self._group.rank), place)

    def _find_all_stuck(self) -> str:
        """Return where all ranks wait, if none of them can go on; else ""."""
        if not self._is_stuck:
            return ""
        keys = [self._name_stuck(rank) for rank in range(self._group.size)]
        if not self._store.check(keys):
            return ""
        places = [self._store.get(key).decode() for key in keys]
        if not all(places):
            return ""
        listed = ", ".join(f"rank {rank} at {place}" for rank, place in enumerate(places))
        return f"no rank has run for {self._group.timeout_seconds:g} s: {listed}"

    def _end_job(self, failure: str) -> None:
        """End a step that waits for a rank that will not come: gloo cannot be interrupted."""
        # Not by `logger`: a program may send that elsewhere, and this process ends.
        text = f"elbowroom: rank {self._group.rank} ends ({self._describe()}), as it waits for another one: {failure}"
        print(text, file=sys.stderr, flush=True)
        self._publish(failure)  # ranks whose connections to this one break now say this, too
        os._exit(EXIT_CODE)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(self._name_beat(self._group.rank), f"{self._beats}, {self._describe()}")

    def _name_beat(self, rank: int) -> str:
        return f"{self._group.prefix}/beat/{rank}"

    def _name_stuck(self, rank: int) -> str:
        return f"{self._group.prefix}/stuck/{rank}"

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
                return f"; its last sign of life: {_read_beat(self._store.get(key).decode())}"
        return ""


def _read_beat(beat: str) -> str:
    """Return what a rank did at a sign of life, without its number."""
    return beat.partition(", ")[2] or beat
