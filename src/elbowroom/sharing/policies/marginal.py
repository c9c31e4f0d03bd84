"""Each byte goes to the job that gains most by it: equal marginal gain in pace over all jobs, by weight.

Fronts are turned into concave hulls of pace over bytes that begin at (0, 0), so one greedy pass decides both which jobs
run and within how many bytes. Once the jobs keep the device busy all the time, one more job slows down all others: it
is admitted unless the sum of paces falls, as it does if the job would run at a low pace for lack of bytes. Protected and due jobs begin at their floors, so a job waits at
most n (q + 2 s).

Source: marginal allocation; B. Fox, "Discrete optimization via marginal analysis", Management Science 13(3), 1966.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, find_gain, list_hull, list_required

MOST_LOSS = 0.01
"""Share of the highest sum of paces that may be lost by admitting jobs to a busy device."""


class _Split:
    """Bytes handed out so far, with the paces and loads of the jobs."""

    def __init__(self, capacity_bytes: int) -> None:
        self.bytes: dict[int, int] = {}
        self.free_bytes = capacity_bytes
        self.pace = 0.0
        self.load = 0.0
        self.most = 0.0  # highest sum of paces so far

    def set(self, demand: Demand, nbytes: int) -> None:
        """Give a job so many bytes instead of those it has."""
        before_bytes = self.bytes.get(demand.job, 0)
        self.pace += demand.weight * (demand.find_pace(nbytes) - demand.find_pace(before_bytes))
        self.load += demand.find_load(nbytes) - demand.find_load(before_bytes)
        self.free_bytes -= nbytes - before_bytes
        self.bytes[demand.job] = nbytes
        self.most = max(self.most, self.pace / max(1.0, self.load))

    def is_worth_admitting(self, demand: Demand, nbytes: int) -> bool:
        """Return True if the sum of paces does not fall with this job, though it takes compute from the others."""
        pace = self.pace + demand.weight * demand.find_pace(nbytes)
        load = self.load + demand.find_load(nbytes)
        return pace / max(1.0, load) >= (1 - MOST_LOSS) * self.most


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Hand out the device in order of gain in pace a byte."""
    split = _Split(capacity_bytes)
    for demand in list_required(demands, capacity_bytes):
        split.set(demand, demand.floor_bytes)
    by_job = {each.job: each for each in demands}
    steps: list[tuple[float, int, int, int]] = []  # gain a byte, job, bytes before, bytes after
    for demand in demands:
        begin_bytes = split.bytes.get(demand.job, 0)
        hull = list_hull(demand, (begin_bytes, demand.find_pace(begin_bytes)))
        for before, after in itertools.pairwise(hull):
            steps.append((-demand.weight * find_gain(before, after), demand.job, before[0], after[0]))
    heapq.heapify(steps)
    while steps:
        _, job, before_bytes, after_bytes = heapq.heappop(steps)
        demand = by_job[job]
        if split.bytes.get(job, 0) != before_bytes or after_bytes - before_bytes > split.free_bytes:
            continue
        if before_bytes or split.is_worth_admitting(demand, after_bytes):
            split.set(demand, after_bytes)
    _fill(split, demands)
    return split.bytes


def _fill(split: _Split, demands: Sequence[Demand]) -> None:
    """Spend what is left on points between those of the hulls, and on floors of waiting jobs."""
    for demand in sorted(demands, key=lambda each: (each.job not in split.bytes, each.arrival)):
        before_bytes = split.bytes.get(demand.job, 0)
        point = demand.find_point(before_bytes + split.free_bytes)
        if point is None or point.nbytes <= before_bytes:
            continue
        if before_bytes or split.is_worth_admitting(demand, point.nbytes):
            split.set(demand, point.nbytes)
