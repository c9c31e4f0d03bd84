"""Lent bytes: what a job gives back of its lease while it makes no step, and has again for the next one.

    training step      evaluation, checkpoint, loading of data                       training step
    |------------|----------|----------------------------------------------------|----|-----------|
     lease of steps          floor of a step, or what is in use if that is more    ^ lease of steps
                                                                                   at most a second

A job between two steps does not say what it does. So what it has used since its last step tells what it needs, and an
allocation beyond that has the lease of steps back first. The job keeps the floor of its steps, so it can always go on.
"""

from __future__ import annotations

import math
import threading
import time
import weakref

from elbowroom.hooks.ledger import Ledger
from elbowroom.runtime.state_pager import StatePager
from elbowroom.sharing.messages import LeaseGrant, Triples
from elbowroom.sharing.transport.client import BrokerClient

LEAST_IDLE_SECONDS = 2.0
"""Time without a step after which a job lends; the length of its last step if that is more."""

MARGIN = 16
"""Share of what was used, as a divisor, that the job keeps beside it."""

WORTH_LENDING = 8
"""Share of a lease, as a divisor. Less is not lent."""

REGAIN_SECONDS = 1.0
"""Time for which a step waits for its lease. After that it is planned for what is there."""

UNKNOWN = (1.0, 1.0)
"""Seconds of a step, and of its compute, of a job that lends before its first step."""

LONGEST_WAIT_SECONDS = 5.0
"""Time for which an allocation between steps waits for the lease. After that it passes, and counts as taken."""


class LentBytes:
    """Lends bytes of a lease between steps, in the thread of the broker's client.

    Args:
        client: connection to the broker.
        floor_bytes: the least bytes for the first steps.

    Attributes:
        applied: the lease in force; None before the first one.
        front: floor in bytes and points, of steps. No points while no step is known.
    """

    def __init__(self, client: BrokerClient, floor_bytes: int) -> None:
        self.applied: LeaseGrant | None = None
        self.front: tuple[int, Triples] = (floor_bytes, ())
        self._client = client
        self._ledger: Ledger | None = None
        self._pager: StatePager | None = None
        self._lock = threading.RLock()
        self._lends_from = math.inf  # infinite in a step
        self._idle_seconds = 0.0
        self._used_bytes = 0  # the most since the last step
        self._has_asked = self._is_lent = self._has_taken_up = False

    def attach(self, ledger: Ledger, pager: StatePager) -> None:
        """Lend from now on, if the ledger can limit allocations between steps."""
        if ledger.scope is None:
            return
        self._ledger, self._pager = ledger, pager
        beat = weakref.WeakMethod(self._beat)
        self._client.on_beat = lambda: None if (call := beat()) is None else call()

    def begin_idle(self, step_seconds: float) -> None:
        """Note that a step has ended, or that there is none yet."""
        if self._ledger is None:
            return
        with self._lock:
            self._idle_seconds = max(LEAST_IDLE_SECONDS, step_seconds)
            self._used_bytes = 0
            self._ledger.take_recent_peak()
            self._wait_again()

    def end_idle(self, wanted_bytes: int = 0) -> bool:
        """Note that a step is about to begin. Ask for lent bytes, and wait a moment for them.

        Args:
            wanted_bytes: of the lease to wait for.

        Returns:
            Whether a lease was taken up since the last step.
        """
        if self._ledger is None:
            return False
        with self._lock:
            self._lends_from = math.inf
            has_taken_up, self._has_taken_up = self._has_taken_up, False
            if self._is_lent:
                self._ask_back()
                self._client.wait_for(lambda grant: grant.nbytes >= wanted_bytes, REGAIN_SECONDS)
            self._ledger.limit_between_steps(None)
            return has_taken_up

    def _wait_again(self) -> None:
        self._has_asked = False
        self._lends_from = time.monotonic() + self._idle_seconds

    def _ask_back(self) -> None:
        self._is_lent = False
        self._client.report(*self.front)

    def _beat(self) -> None:
        """Lend, if the job has made no step for some time. Called by the client's thread."""
        if self._ledger is None or not self._lock.acquire(blocking=False):
            return
        try:
            if math.isinf(self._lends_from):
                return
            self._used_bytes = max(self._used_bytes, self._ledger.take_recent_peak())
            self._client.note_use(self._used_bytes)
            if time.monotonic() < self._lends_from:
                return
            if not self._has_asked:
                self._has_asked = True
                self._lend()
            self._take_up(self._ledger)
        finally:
            self._lock.release()

    def _lend(self) -> None:
        """Tell the broker what the job needs until its next step."""
        floor_bytes, points = self.front
        if self.applied is None:
            return
        nbytes = max(floor_bytes, self._used_bytes + self._used_bytes // MARGIN)
        if nbytes <= self.applied.nbytes - self.applied.nbytes // WORTH_LENDING:
            self._is_lent = True
            self._client.report(floor_bytes, ((nbytes, *(points[-1][1:] if points else UNKNOWN)),))

    def _take_up(self, ledger: Ledger) -> None:
        """Take up a lease that has come meanwhile, if the job is within it."""
        grant, before = self._client.grant, self.applied
        if grant is None or before is None or grant is before or grant.nbytes < self._used_bytes or not before.nbytes:
            return
        ledger.limit_between_steps(grant.nbytes, self._make_room)
        if ledger.live_bytes > grant.nbytes or not self._client.take(grant):
            ledger.limit_between_steps(before.nbytes, self._make_room)
            return
        ledger.trim()
        self.applied, self._has_taken_up = grant, True
        self._client.confirm(grant, grant.nbytes)

    def _make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Have the lease of steps back for a request between steps, or else have state leave for it.

        Returns:
            False if the request has to pass without.
        """
        ledger, pager = self._ledger, self._pager
        assert ledger is not None and pager is not None
        with self._lock:
            if math.isinf(self._lends_from):
                return True  # a step has begun meanwhile, with a limit of its own
            needed_bytes = ledger.live_bytes + requested_bytes
            if self._is_lent:
                self._ask_back()
                self._idle_seconds *= 2  # it is not known what the job needs
                self._wait_again()
                grant = self._client.wait_for(lambda each: each.nbytes >= needed_bytes, LONGEST_WAIT_SECONDS)
                if grant is not None and self._client.take(grant):
                    ledger.limit_between_steps(grant.nbytes, self._make_room)
                    self.applied = grant
                    self._client.confirm(grant, grant.nbytes)
                    return True
            if self.applied is not None and needed_bytes <= self.applied.nbytes:
                return True  # another thread has brought it back
            if pager.is_active and pager.make_room(missing_bytes):
                return True
            ledger.limit_between_steps(None)
            self._client.note_use(needed_bytes)
            return False
