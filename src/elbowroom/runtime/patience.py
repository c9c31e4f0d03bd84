"""How much of a step may go by in replays and waits for moves."""

from __future__ import annotations

import logging

from elbowroom.errors import Thrashing

logger = logging.getLogger(__name__)

WORTH_SAYING, ENOUGH = 10.0, 100.0
"""Replays and waits for moves that take so many times what the rest of the step took: worth a warning, and the end."""

NOT_LONG = 1.0
"""Seconds below which neither is said."""


class Patience:
    """Says once that a step thrashes, and ends it where that does not get better.

    Attributes:
        replay_seconds: that replays took so far.
        is_endless: whether it is never ended: once a step is over, what is left must be carried out.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.replay_seconds = 0.0
        self.is_endless = self._has_said = False

    def watch(self, move_seconds: float, busy_seconds: float) -> None:
        """So long was waited for moves, and so long took the rest of the step but for replays.

        Raises:
            Thrashing: it has lasted long enough.
        """
        lost = (self.replay_seconds + move_seconds) / max(NOT_LONG, busy_seconds)
        if lost <= (ENOUGH if self._has_said else WORTH_SAYING):
            return
        error = Thrashing(self.replay_seconds, move_seconds, busy_seconds, self._budget_bytes)
        if lost > ENOUGH and not self.is_endless:
            raise error
        self._has_said = True
        logger.warning("%s", error)
