"""Shifts of periodic memory curves: the common peak is right, and lower where it can be. No torch."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies as st

from elbowroom.sharing.alignment import Alignment, StepCurve, align

CURVES = st.lists(
    st.builds(
        StepCurve,
        step_seconds=st.floats(0.1, 10),
        levels=st.lists(st.integers(0, 100), min_size=1, max_size=9).map(tuple),
    ),
    max_size=4,
)


def measure(curves: list[StepCurve], found: Alignment, late: list[float]) -> int:
    """Return the most bytes held at any of many times. Each job runs as its docstring says, without slots."""
    most = 0
    for tick in range(2000):
        now = tick / 2000 * found.period_seconds
        held = 0
        for curve, shift, begin in zip(curves, found.shifts, late, strict=True):
            since = (now - shift - begin) % found.period_seconds
            part = int(since / curve.step_seconds * len(curve.levels))
            held += curve.levels[min(part, len(curve.levels) - 1)]
        most = max(most, held)
    return most


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(CURVES, st.sampled_from([0.0, 0.05]), st.integers(0, 9))
def test_jobs_hold_no_more_than_the_common_peak(curves: list[StepCurve], late_share: float, seed: int) -> None:
    found = align(curves, late_share)
    draw = random.Random(seed)
    late = [draw.uniform(-late_share, late_share) * found.period_seconds for _ in curves]
    assert measure(curves, found, late) <= found.peak_bytes <= found.sum_bytes
    assert found.peak_bytes >= max((each.peak_bytes for each in curves), default=0)


def test_peaks_that_can_be_apart_are_apart() -> None:
    spike = StepCurve(step_seconds=1.0, levels=(1, 9, 1, 1))
    found = align([spike, spike])
    assert (found.peak_bytes, found.sum_bytes, found.gain_bytes) == (10, 18, 8)
    assert align([spike] * 4).peak_bytes == 12
    flat = StepCurve(step_seconds=1.0, levels=(9,))
    assert align([flat, flat]).gain_bytes == 0
    # The shorter step waits for the longer one, with what it holds at its end.
    short = StepCurve(step_seconds=0.25, levels=(1, 9, 3, 2))
    found = align([spike, short])
    assert found.period_seconds == 1.0
    assert found.peak_bytes == pytest.approx(11)
    assert align([]).gain_bytes == 0
