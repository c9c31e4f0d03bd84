"""First come, first served: a job gets all the bytes that it can use, or waits until they are free.

Jobs never share memory at a cost, and no running job is paused. A job that is too large for the device gets all of
the device. A job waits until those before it have ended, which has no bound: not for jobs that run without end.

Source: the queue of batch systems (FCFS without backfilling).
"""

from __future__ import annotations

from collections.abc import Sequence

from elbowroom.sharing.demand import Demand

PREEMPTS = False
"""Running jobs are never paused, so no job becomes due."""


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Keep the leases of running jobs, and admit waiting ones in order of arrival while all their bytes are free."""
    found: dict[int, int] = {}
    for demand in sorted(demands, key=lambda each: (not each.is_running, each.arrival)):
        wanted_bytes = min(demand.most_bytes, capacity_bytes)
        free_bytes = capacity_bytes - sum(found.values())
        if wanted_bytes <= free_bytes:
            found[demand.job] = wanted_bytes
        elif demand.is_running and demand.floor_bytes <= free_bytes:
            found[demand.job] = free_bytes
        elif not demand.is_running:
            break
    return found
