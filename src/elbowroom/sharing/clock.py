"""Clock of the broker: time that only goes forward, and time in which its jobs could be heard."""

from __future__ import annotations

import math

LONGEST_PAUSE = 0.25
"""Time without an event, as a share of the time after which a job is silent, that counts as silence of the jobs. Beyond
it the broker itself was stopped, or the clock has jumped."""


class BrokerClock:
    """Time from events.

    If the given time goes back, the time since then is added to what had passed before.

    Args:
        heartbeat_seconds: after which a job without a message is silent.

    Attributes:
        now: seconds.
        listening: seconds in which the broker could hear its jobs.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self.now = 0.0
        self.listening = 0.0
        self._longest_pause = LONGEST_PAUSE * heartbeat_seconds
        self._latest = -math.inf
        self._set_back = 0.0

    def set(self, now: float) -> None:
        """Take the time of an event."""
        self._set_back += max(0.0, self._latest - now)
        self._latest = now
        before, self.now = self.now, now + self._set_back
        self.listening += min(self.now - before, self._longest_pause)
