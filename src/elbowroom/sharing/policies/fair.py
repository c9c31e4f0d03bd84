"""Equal bytes for every job: max-min fairness, by weight.

Jobs that need less than their share leave the rest to the others. A job whose floor exceeds its share gets its floor.
Who runs goes by turn, so a job waits at most n (q + 2 s).

Source: D. Bertsekas, R. Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2 (max-min fairness).
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, admit_in_order, sort_by_turn


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Admit jobs by turn, and raise all of them to the same level of bytes for their weight."""
    open_jobs = admit_in_order(sort_by_turn(demands), capacity_bytes)
    found: dict[int, int] = {}
    left_bytes = capacity_bytes
    # Fix the jobs whose share is out of their range, one at a time: first those that need more than their share.
    while open_jobs:
        weight = sum(each.weight for each in open_jobs)
        shares = {each.job: int(left_bytes * (each.weight / weight)) for each in open_jobs}
        fixed = next((each for each in open_jobs if each.floor_bytes > shares[each.job]), None)
        if fixed is not None:
            found[fixed.job] = fixed.floor_bytes
        else:
            fixed = next((each for each in open_jobs if each.most_bytes < shares[each.job]), None)
            if fixed is None:
                return found | shares
            found[fixed.job] = fixed.most_bytes
        left_bytes -= found[fixed.job]
        open_jobs.remove(fixed)
    return found
