"""Notices that steps take another time than predicted, but not that a single one does."""

from __future__ import annotations

TOLERANCE = 0.3
"""Largest difference between prediction and measurement, as a share of the measurement. Source: TENSILE (see
`cost.op_times`), whose scheduler plans again when op latencies change."""

LEAST_SECONDS = 0.005
"""Smaller differences do not count."""

FIRST_PATIENCE = 2
"""Steps in a row that have to be off at first. The number doubles each time, so the times of a noisy machine are
measured again ever more rarely."""


def is_off(seconds: float, predicted_seconds: float, *, only_slower: bool = False) -> bool:
    """Return True if a measured step differs too much from its prediction.

    Args:
        only_slower: accept steps that are faster than predicted.
    """
    difference = seconds - predicted_seconds
    return (difference if only_slower else abs(difference)) > max(TOLERANCE * seconds, LEAST_SECONDS)


class PredictionCheck:
    """Compares the measured steps of one kind with their predictions."""

    def __init__(self) -> None:
        self._patience = FIRST_PATIENCE
        self._steps_off = 0
        self._seconds_off = 0.0

    def fails(
        self, seconds: float, predicted_seconds: float, *, only_slower: bool = False, cost_seconds: float = 0.0
    ) -> bool:
        """Record a step. Return True if op times should be measured again; for other arguments see `is_off`.

        Args:
            cost_seconds: that measuring and planning the step again takes. Steps have to be off by as much in total,
                and by twice as much each time.
        """
        if not is_off(seconds, predicted_seconds, only_slower=only_slower):
            self._steps_off = 0
            return False
        self._steps_off += 1
        self._seconds_off += abs(seconds - predicted_seconds)
        cost_seconds *= self._patience // FIRST_PATIENCE
        if self._steps_off < self._patience or self._seconds_off < cost_seconds:
            return False
        self._steps_off = 0
        self._seconds_off = 0.0
        self._patience *= 2
        return True
