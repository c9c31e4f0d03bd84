"""Seconds of ops that were measured in earlier steps, by op and shapes, and when they are believed.

An op that was measured before gets that time instead of the roofline's, if the two are in a plausible ratio.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterable, Mapping, Sequence

from elbowroom.ir.op_times import OpTime
from elbowroom.ir.trace import Op, Trace, View

SMOOTHING = 0.3
"""Weight of the latest measurement in a smoothed time. Source: X. Zhang et al., "TENSILE: a tensor granularity dynamic
GPU memory scheduling method toward multiple dynamic workloads system", IEEE TKDE 35(8), 2023: exponential smoothing of
op latencies."""

MOST_TIMES_THE_ROOFLINE = 100.0
"""Measured times are ignored if they exceed the roofline's by more than this factor, or fall below it by as much."""

MOST_KINDS = 8192
"""Kinds of op that are remembered; the least recently measured are forgotten first."""


def make_key(op: Op) -> str:
    """Return the key of an op: its name, and a digest of the dtypes and shapes of its arguments and results."""
    shapes = ">".join(" ".join(map(_spell, views)) for views in (op.reads, op.writes))
    return f"{op.name} {hashlib.blake2b(shapes.encode(), digest_size=9).hexdigest()}"


def is_plausible(seconds: float, estimate: float) -> bool:
    """Return True if a measured time is near enough to the roofline's to be believed."""
    return estimate / MOST_TIMES_THE_ROOFLINE <= seconds <= estimate * MOST_TIMES_THE_ROOFLINE


def list_seconds(trace: Trace, op_seconds: Sequence[float]) -> dict[str, float]:
    """Return the median seconds of each kind of op in one measured step; ops of 0 seconds did not run."""
    found: dict[str, list[float]] = {}
    for op, seconds in zip(trace.ops, op_seconds, strict=True):
        if seconds > 0:
            found.setdefault(make_key(op), []).append(seconds)
    return {key: statistics.median(each) for key, each in found.items()}


def smooth(earlier: float, latest: float, steps: int = 1) -> float:
    """Return the smoothed time after another step. `steps`: number of steps measured before."""
    return earlier + max(SMOOTHING, 1 / (steps + 1)) * (latest - earlier)


def merge(known: Iterable[OpTime], latest: Mapping[str, float]) -> tuple[OpTime, ...]:
    """Return known times updated by those of another step; at most `MOST_KINDS`, the latest last."""
    times = {each.key: each for each in known}
    for key, seconds in latest.items():
        earlier = times.pop(key, OpTime(key=key, seconds=seconds, steps=0))
        times[key] = dataclasses.replace(
            earlier, seconds=smooth(earlier.seconds, seconds, earlier.steps), steps=earlier.steps + 1
        )
    return tuple(times.values())[-MOST_KINDS:]


def _spell(view: View) -> str:
    return f"{view.dtype}{list(view.shape)}"
