"""When steps are captured, if several kinds of them take turns."""

from __future__ import annotations

import pytest

from elbowroom.capture_schedule import CaptureSchedule


@pytest.mark.parametrize("kinds", range(2, 13))
def test_kinds_that_take_turns_are_all_captured(kinds: int) -> None:
    schedule, seen, known = CaptureSchedule(), set[int](), {0}
    for step in range(1, 100 * kinds):
        kind = step % kinds
        if schedule.is_due(step, knows_some=True):
            if kind in seen - known:
                known.add(kind)
                schedule.note_success()
            else:
                schedule.put_off(step)
        elif kind in seen - known:
            schedule.note_recurrence(step, None)
        seen.add(kind)
    assert known == set(range(kinds))


def test_captures_begin_anew_after_futile_ones() -> None:
    schedule = CaptureSchedule()
    for step in (0, 1, 3, 7):
        schedule.put_off(step, "no plan fits")
    assert not schedule.is_due(8, knows_some=False)
    schedule.begin_anew()
    assert schedule.is_due(8, knows_some=False)
