"""Collects the records of a run's steps: all of a short run, the first and the latest of a long one."""

from __future__ import annotations

from collections import Counter, deque

from elbowroom.ir.journal import Journal, Mode, StepRecord

RECORDS_KEPT = 1000
"""Records kept of the first steps of a long run, and as many of the latest."""

_SUMMED = {
    "seconds": "step_seconds",
    "stall_seconds": "stall_seconds",
    "offloaded_bytes": "offloaded_bytes",
    "reloaded_bytes": "reloaded_bytes",
    "recomputed": "recomputed_segments",
}
"""Fields of a record that are added up over all steps, with their names in `JournalWriter.metrics`."""


class JournalWriter:
    """Collects step records for a Journal.

    Attributes:
        count: number of steps so far.
    """

    def __init__(self) -> None:
        self._first: list[StepRecord] = []
        self._latest: deque[StepRecord] = deque(maxlen=RECORDS_KEPT)
        self._last: StepRecord | None = None
        self._sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
        self._modes: Counter[Mode] = Counter()
        self._max_peak_bytes: int | None = None
        self.count = 0

    def add(self, record: StepRecord) -> None:
        """Add the record of a completed step."""
        self.count += 1
        self._last = record
        if len(self._first) < RECORDS_KEPT:
            self._first.append(record)
        else:
            self._latest.append(record)
        for field in _SUMMED:
            self._sums[field] += getattr(record, field)
        self._modes[record.mode] += 1
        if record.peak_bytes is not None:
            self._max_peak_bytes = max(self._max_peak_bytes or 0, record.peak_bytes)

    def journal(self) -> Journal:
        """Return the journal so far."""
        return Journal(steps=(*self._first, *self._latest))

    def metrics(self) -> dict[str, int | float | str]:
        """Return the figures of the last step and the totals of all steps, as listed in `Room.metrics`."""
        if self._last is None:
            return {}
        found: dict[str, int | float | str | None] = {
            "step": self._last.step,
            "mode": self._last.mode.value,
            "peak_bytes": self._last.peak_bytes,
            "resident_bytes": self._last.resident_bytes,
            "max_peak_bytes": self._max_peak_bytes,
        }
        for field, name in _SUMMED.items():
            found[name] = getattr(self._last, field)
            found[f"total_{name}"] = self._sums[field]
        for mode in Mode:
            found[f"{mode}_steps"] = self._modes[mode]
        return {name: value for name, value in found.items() if value is not None}
