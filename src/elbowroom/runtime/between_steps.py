"""Memory between steps: model state leaves for what an evaluation, a checkpoint or loading of data takes."""

from __future__ import annotations

from elbowroom.hooks.ledger import Ledger
from elbowroom.runtime.state_pager import StatePager

PASSED = 16
"""Once nothing more can leave, requests pass until this share of the budget more is live, as a divisor."""


class BetweenSteps:
    """Keeps a job within its budget between steps, as far as its state can leave. What has no room then passes.

    Only on a CPU, and while ops are watched for their use of state.

    Args:
        ledger: counts bytes on the device.
        pager: moves state.
    """

    def __init__(self, ledger: Ledger, pager: StatePager) -> None:
        self._ledger = ledger
        self._pager = pager
        self._budget_bytes = 0

    def begin(self, budget_bytes: int) -> None:
        """Limit requests until the next step begins."""
        if self._pager.is_active:
            self._budget_bytes = budget_bytes
            self._ledger.limit_between_steps(budget_bytes, self._make_room)

    def _make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Have state leave for a request. Return False if it has to pass without."""
        if self._pager.make_room(missing_bytes):
            return True
        passed_bytes = self._ledger.live_bytes + requested_bytes + self._budget_bytes // PASSED
        self._ledger.limit_between_steps(passed_bytes, self._make_room)
        return False
