"""A Journal: what was measured while steps ran."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from elbowroom.units import format_bytes, format_seconds


class Mode(enum.StrEnum):
    """Mode in which a step was run."""

    CAPTURE = "capture"  # all that may leave leaves, while its trace is taken
    PLANNED = "planned"
    PLAIN = "plain"  # everything fits: nothing of ours is attached
    DYNAMIC = "dynamic"  # decided on as it went
    DRIFTED = "drifted"  # was none of the steps that are known; decided on as it went from where it left them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step as it was.

    Attributes:
        step: counts from 0.
        seconds: wall time between the `with` block's two ends.
        stall_seconds: of it, time the program waited for transfers (host time).
        peak_bytes: most tensor bytes on the device at once; None where this step was not metered.
        resident_bytes: the process's peak resident memory during the step (CPU), or the allocator's peak reserved
            bytes (CUDA); None where this step was not metered.
        offloaded_bytes, reloaded_bytes: moved each way.
        recomputed: segments replayed.
        saves, needs: hook calls.
        note: why the step drifted, could not be planned, or kept what should have left; "" otherwise.
    """

    step: int
    mode: Mode
    seconds: float
    stall_seconds: float
    peak_bytes: int | None
    resident_bytes: int | None
    offloaded_bytes: int
    reloaded_bytes: int
    recomputed: int
    saves: int
    needs: int
    note: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The steps of one room, oldest first; long runs keep the first and the most recent ones."""

    steps: tuple[StepRecord, ...]

    def __repr__(self) -> str:
        if not self.steps:
            return "<Journal: no step>"
        counts = Counter(record.mode for record in self.steps)
        modes = ", ".join(f"{mode} {count}" for mode, count in counts.items())
        last = f"step {self.steps[-1].step} took {format_seconds(self.steps[-1].seconds)}"
        peak = "" if self.peak_bytes is None else f", max peak {format_bytes(self.peak_bytes)}"
        return f"<Journal: steps by mode: {modes}; {last}{peak}>"

    @property
    def peak_bytes(self) -> int | None:
        """The most of all steps that were metered; None where none was."""
        return max((record.peak_bytes for record in self.steps if record.peak_bytes is not None), default=None)
