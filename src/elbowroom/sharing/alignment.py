"""Alignment: when jobs begin their steps so that the peaks of their memory do not fall together.

    job A   __/\\____/\\____/\\__      step and wait have the same length for all: the longest step
    job B   ____/\\____/\\____/\\      B waits once, at a step boundary, for its shift
    sum     lower than the sum of the peaks

A step is cut into slots of equal length. A job counts in each slot with the most bytes that it holds there, and between
its steps with those at its end, so the common peak is not lower than the true one as long as steps keep their length.

Source: K. Zhang et al., "TENSILE", 2021, adds the peaks of jobs up, and names aligned jobs as future work. Shifts of
periodic demands: coordinate descent over all slots.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

SLOTS = 64
"""Slots of a common period."""

ROUNDS = 3
"""Times that each job's shift is chosen again, given those of the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Memory of one job over a step.

    Attributes:
        step_seconds: length of the step.
        levels: most bytes held in each of some equal parts of it.
    """

    step_seconds: float
    levels: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes held."""
        return max(self.levels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Begins of the steps of several jobs.

    Attributes:
        period_seconds: from one step of a job to its next; jobs with shorter steps wait at their boundaries.
        shifts: seconds after the begin of the period at which each job begins its step.
        peak_bytes: the most bytes that all jobs hold together.
        sum_bytes: sum of their peaks: what they may hold together without shifts.
    """

    period_seconds: float
    shifts: tuple[float, ...]
    peak_bytes: int
    sum_bytes: int

    @property
    def gain_bytes(self) -> int:
        """Bytes by which shifts lower what the jobs hold together."""
        return self.sum_bytes - self.peak_bytes


def align(curves: Sequence[StepCurve], late_share: float = 0.0) -> Alignment:
    """Choose shifts with a low common peak.

    Args:
        curves: one for each job.
        late_share: share of the period by which any step may begin early or late, or drag on.
    """
    if not curves:
        return Alignment(period_seconds=0.0, shifts=(), peak_bytes=0, sum_bytes=0)
    period = max(each.step_seconds for each in curves)
    late_slots = math.ceil(late_share * SLOTS)
    slots = [_widen(_cut(each, period), late_slots) for each in curves]
    order = sorted(range(len(curves)), key=lambda job: (-curves[job].peak_bytes, job))
    shifts: dict[int, int] = {}
    for _ in range(ROUNDS):
        for job in order:
            others = [_turn(slots[each], shift) for each, shift in shifts.items() if each != job]
            held = [sum(column) for column in zip(*others, strict=True)] or [0] * SLOTS
            best = min(range(SLOTS), key=lambda shift: (_find_peak(held, _turn(slots[job], shift)), shift))
            shifts[job] = best
    together = [sum(column) for column in zip(*(_turn(slots[job], shifts[job]) for job in order), strict=True)]
    return Alignment(
        period_seconds=period,
        shifts=tuple(shifts[job] * period / SLOTS for job in range(len(curves))),
        peak_bytes=max(together),
        sum_bytes=sum(each.peak_bytes for each in curves),
    )


def _cut(curve: StepCurve, period: float) -> list[int]:
    """Return the most bytes in each slot of the period, if the step begins with it."""
    parts = len(curve.levels)
    part_seconds, slot_seconds = curve.step_seconds / parts, period / SLOTS
    found = []
    for slot in range(SLOTS):
        first = math.floor(slot * slot_seconds / part_seconds + 1e-9)
        last = math.ceil((slot + 1) * slot_seconds / part_seconds - 1e-9)
        found.append(max(curve.levels[first:last], default=curve.levels[-1]))
    return found


def _widen(slots: list[int], count: int) -> list[int]:
    return [max(slots[(slot + shift) % SLOTS] for shift in range(-count, count + 1)) for slot in range(SLOTS)]


def _turn(slots: list[int], shift: int) -> list[int]:
    return slots[SLOTS - shift :] + slots[: SLOTS - shift]


def _find_peak(held: list[int], slots: list[int]) -> int:
    return max(map(int.__add__, held, slots))
