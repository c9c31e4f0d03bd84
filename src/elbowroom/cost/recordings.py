"""Measurements of planned steps: several of them smoothed, and without what the plan replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elbowroom.cost.op_times import smooth
from elbowroom.ir.costs import Measurements
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace


def smooth_recordings(recordings: Sequence[Measurements], workspace_bytes: tuple[int, ...]) -> Measurements:
    """Return smoothed times of steps of one kind, measured one after the other.

    Args:
        workspace_bytes: of the result, since bytes do not change as times do.
    """
    return Measurements(
        op_seconds=_smooth_all([each.op_seconds for each in recordings]),
        workspace_bytes=workspace_bytes,
        step_seconds=_smooth_all([(each.step_seconds,) for each in recordings])[0],
        stall_seconds=_smooth_all([(each.stall_seconds,) for each in recordings])[0],
    )


def leave_out_replays(trace: Trace, plan: Plan, measurements: Measurements) -> Measurements:
    """Return measurements of a step under a plan as if it had replayed nothing."""
    seconds = {op.tick: each for op, each in zip(trace.ops, measurements.op_seconds, strict=True)}
    replayed = sum(seconds[tick] for segment in plan.segments for tick in segment.ops)
    return dataclasses.replace(measurements, step_seconds=max(0.0, measurements.step_seconds - replayed))


def _smooth_all(measured: Sequence[Sequence[float]]) -> tuple[float, ...]:
    smoothed = list(measured[0])
    for steps, latest in enumerate(measured[1:], start=1):
        smoothed = [smooth(*pair, steps) for pair in zip(smoothed, latest, strict=True)]
    return tuple(smoothed)
