"""Limits the time that a step spends on replays and on waiting for transfers."""

from __future__ import annotations

import logging

from elbowroom.errors import Thrashing
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_state import StepState

logger = logging.getLogger(__name__)

WORTH_SAYING = 10.0
ENOUGH = 100.0
"""Seconds of replays and waits per second of the step's own ops that cause a warning, and an error."""

NOT_LONG = 1.0
"""Lower bound in seconds on the time of a step's own ops for this comparison."""


class ThrashGuard:
    """Warns once when a step thrashes, and ends the step if it gets worse.

    Attributes:
        replay_seconds: seconds of replays so far.
    """

    def __init__(self, state: StepState, environment: StepEnvironment) -> None:
        self._state = state
        self._budget_bytes = environment.budget_bytes
        self._transfers = environment.transfers
        self._stalled_before = self._transfers.stall_seconds
        self._has_warned = False
        self.replay_seconds = 0.0

    def check(self) -> None:
        """Compare the seconds lost so far with those of the step's own ops.

        Raises:
            Thrashing: the ratio exceeds `ENOUGH`. Not raised after the step, when dropped storages must be recomputed.
        """
        move_seconds = self._transfers.stall_seconds - self._stalled_before
        busy_seconds = self._state.watcher.busy_seconds
        lost = (self.replay_seconds + move_seconds) / max(NOT_LONG, busy_seconds)
        if lost <= (ENOUGH if self._has_warned else WORTH_SAYING):
            return
        error = Thrashing(self.replay_seconds, move_seconds, busy_seconds, self._budget_bytes)
        if lost > ENOUGH and not self._state.phase.has_ended:
            try:
                raise error
            finally:
                del error  # its frames include this one
        self._has_warned = True
        logger.warning("%s", error)
