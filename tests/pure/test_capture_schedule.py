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
