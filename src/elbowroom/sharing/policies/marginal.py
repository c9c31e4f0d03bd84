"""Each byte goes to the job that gains most by it: equal marginal gain in pace over all jobs, by weight.

Fronts are turned into concave hulls of pace over bytes that begin at (0, 0), so one greedy pass decides both which jobs
run and within how many bytes. Protected and due jobs begin at their floors, so a job waits at most n (q + 2 s).

Source: marginal allocation; B. Fox, "Discrete optimization via marginal analysis", Management Science 13(3), 1966.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, grow_by_point, list_hull, list_required


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Hand out the device in order of gain in pace a byte."""
    found = {each.job: each.floor_bytes for each in list_required(demands, capacity_bytes)}
    free_bytes = capacity_bytes - sum(found.values())
    by_job = {each.job: each for each in demands}
    steps: list[tuple[float, int, int, int]] = []  # gain a byte, job, bytes before, bytes after
    for demand in demands:
        begin_bytes = found.get(demand.job, 0)
        hull = list_hull(demand, (begin_bytes, demand.find_pace(begin_bytes)))
        for before, after in itertools.pairwise(hull):
            gain = demand.weight * (after[1] - before[1]) / (after[0] - before[0])
            steps.append((-gain, demand.job, before[0], after[0]))
    heapq.heapify(steps)
    while steps:
        _, job, before_bytes, after_bytes = heapq.heappop(steps)
        if found.get(job, 0) == before_bytes and after_bytes - before_bytes <= free_bytes:
            found[job] = after_bytes
            free_bytes -= after_bytes - before_bytes
    return _fill(found, by_job, free_bytes)


def _fill(found: dict[int, int], by_job: dict[int, Demand], free_bytes: int) -> dict[int, int]:
    """Spend what is left on points between those of the hulls, and on floors of waiting jobs."""
    for demand in sorted(by_job.values(), key=lambda each: (each.job not in found, each.arrival)):
        while (more_bytes := grow_by_point(demand, found.get(demand.job, 0), free_bytes)) is not None:
            free_bytes -= more_bytes - found.get(demand.job, 0)
            found[demand.job] = more_bytes
    return found
