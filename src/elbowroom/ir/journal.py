"""Journal: measurements of the steps that ran."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter

from elbowroom.units import format_bytes, format_seconds


class Mode(enum.StrEnum):
    """Mode in which a step was run."""

    CAPTURE = "capture"  # traced, with every movable storage offloaded
    PLANNED = "planned"
    PLAIN = "plain"  # everything fits: no hooks are attached
    DYNAMIC = "dynamic"  # a policy decides during the step
    DRIFTED = "drifted"  # matched no known step; a policy decides from the divergence on


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Measurements of one step.

    Attributes:
        step: counts from 0.
        seconds: wall time of the `with` block.
        stall_seconds: part of it spent waiting for transfers (host time).
        budget_bytes: in force during the step; 0 if unknown.
        peak_bytes: peak tensor bytes on the device; None if this step was not metered.
        resident_bytes: the process's peak resident memory during the step (CPU; steps shorter than 0.1 s share that of
            several), or the allocator's peak reserved bytes (CUDA); None if this step was not metered.
        offloaded_bytes, reloaded_bytes: moved each way.
        recomputed: segments replayed.
        saves, needs: calls of the pack and unpack hooks.
        note: why the step diverged, could not be planned, or kept storages that should have left; "" otherwise.
    """

    step: int
    mode: Mode
    seconds: float
    stall_seconds: float
    budget_bytes: int
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
        """Highest peak of all metered steps; None if no step was metered."""
        return max((record.peak_bytes for record in self.steps if record.peak_bytes is not None), default=None)


NO_STEPS = Journal(steps=())
"""Journal of no steps."""
