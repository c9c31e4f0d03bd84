"""Memory between steps: model state leaves for what an evaluation, a checkpoint or loading of data takes."""

from __future__ import annotations

import threading

from elbowroom.hooks.ledger import Ledger
from elbowroom.native import library
from elbowroom.runtime.state_pager import StatePager


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
        self._lock = threading.Lock()
        self._is_between = False
        self._update_watching = library.load().update_watching

    def begin(self, budget_bytes: int) -> None:
        """Limit requests until the next step begins."""
        if self._pager.is_active:
            self._is_between = True
            self._update_watching()  # the step's beginning may have been interrupted
            self._ledger.limit_between_steps(budget_bytes, self._make_room)

    def end(self) -> None:
        """Limit requests no more: a step begins, or the job ends."""
        with self._lock:
            if self._is_between:
                self._ledger.limit_between_steps(None)
                self._is_between = False  # last, so that an interrupted call can be repeated

    def _make_room(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Have state leave for a request. Return False if it has to pass without.

        The limit is raised then, so that state does not leave and come back for each op of an evaluation that needs
        more than the budget in any case: what has come back may stay.
        """
        if self._pager.make_room(missing_bytes):
            return True
        passed_bytes = self._ledger.live_bytes + requested_bytes + self._pager.count_away()
        with self._lock:
            if self._is_between:  # else a step has begun meanwhile in another thread, with a limit of its own
                self._ledger.limit_between_steps(passed_bytes, self._make_room)
                self._pager.budget_bytes = passed_bytes
        return False
