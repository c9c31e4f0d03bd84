"""Each byte goes to the job that gains most by it: equal marginal gain in pace over all jobs, by weight.

Fronts are turned into concave hulls of pace over bytes that begin at (0, 0), so one greedy pass decides both which jobs
run and within how many bytes. Protected and due jobs begin at their floors, so a job waits at most n (q + 2 s).

If the jobs of that split would keep the device busy all the time, bytes are not the only thing that is short: ops that
are computed again take time from all other jobs. Then splits are tried in which jobs run only where they repeat little,
and the one that does most useful work a second is taken.

Jobs that say how long they still run are compared: long and large ones are admitted somewhat earlier, so that they are
not left to the end, where they would not fit together. One that takes nearly as long as all work that is left comes
first, and no job is admitted that would slow it down by keeping the device busy.

Source: marginal allocation; B. Fox, "Discrete optimization via marginal analysis", Management Science 13(3), 1966.
Longest job first: R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence

from elbowroom.sharing.demand import Demand, find_gain, list_hull, list_required

REPEATED_SHARES = (0.02, 0.1, 0.3)
"""Limits on the share of a job's compute that repeats ops, tried on a busy device."""

STAYING = 1.25
"""Factor on the gain of running jobs, since it takes time to pause them."""

URGENT = 0.7
"""Share of the time that all work will take, from which on a job that needs as long by itself comes first."""

FIRST = 1e6
"""Factor on the gain of jobs that come first."""


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Hand out the device in order of gain in pace a byte."""
    required = list_required(demands, capacity_bytes)
    floors = {each.job: each.floor_bytes for each in required}
    urgent = _find_urgent(demands, capacity_bytes)
    weighted = [
        dataclasses.replace(each, weight=each.weight * (FIRST if each.job in urgent else 1.0)) for each in demands
    ]
    if urgent:
        return _split(weighted, floors, capacity_bytes, most_load=1.0)
    best = _split(weighted, floors, capacity_bytes)
    if sum(each.find_load(best.get(each.job, 0)) for each in demands) <= 1:
        return best
    splits = [best]
    grown = _split(required, floors, capacity_bytes)
    for share in REPEATED_SHARES:
        thrifty = [_leave_out(each, share) for each in demands if each.job not in floors]
        splits += [_split([*required, *thrifty], begin, capacity_bytes) for begin in (floors, grown)]
    return max(splits, key=lambda each: _find_useful_work(demands, each))


def _find_urgent(demands: Sequence[Demand], capacity_bytes: int) -> set[int]:
    """Return the jobs that alone take nearly as long as all jobs together, as far as their ends are known."""
    known = [each for each in demands if each.steps_left is not None]
    byte_seconds = work_seconds = 0.0
    for demand in known:
        steps = demand.steps_left or 0
        byte_seconds += steps * min(point.nbytes * point.step_seconds for point in demand.front)
        work_seconds += steps * demand.front[-1].busy_seconds
    least_seconds = max(byte_seconds / capacity_bytes, work_seconds)
    return {each.job for each in known if each.plain_seconds_left >= URGENT * least_seconds}


def _split(
    demands: Sequence[Demand], begin: dict[int, int], capacity_bytes: int, most_load: float = math.inf
) -> dict[int, int]:
    """Take the best step of any hull, beginning at the bytes that some jobs have, as long as one fits.

    Args:
        most_load: no job is admitted that raises the sum of loads above this.
    """
    by_job = {each.job: each for each in demands}
    lengths = _compare_lengths(demands)
    found = dict(begin)
    free_bytes = capacity_bytes - sum(found.values())
    load = sum(each.find_load(found.get(each.job, 0)) for each in demands)
    steps: list[tuple[float, int, int, int]] = []  # gain a byte, job, bytes before, bytes after
    for demand in demands:
        begin_bytes = found.get(demand.job, 0)
        hull = list_hull(demand, (begin_bytes, demand.find_pace(begin_bytes)))
        for before, after in itertools.pairwise(hull):
            gain = demand.weight * find_gain(before, after) * (STAYING if demand.is_running else 1.0)
            if not before[0]:
                gain *= lengths[demand.job]
            steps.append((-gain, demand.job, before[0], after[0]))
    heapq.heapify(steps)

    def take(job: int, nbytes: int) -> None:
        nonlocal free_bytes, load
        present_bytes = found.get(job, 0)
        more_load = by_job[job].find_load(nbytes) - by_job[job].find_load(present_bytes)
        is_allowed = present_bytes or not found or load + more_load <= most_load
        if is_allowed and 0 < nbytes - present_bytes <= free_bytes:
            found[job] = nbytes
            free_bytes -= nbytes - present_bytes
            load += more_load

    while steps:
        _, job, before_bytes, after_bytes = heapq.heappop(steps)
        if found.get(job, 0) == before_bytes:
            take(job, after_bytes)
    # Spend what is left on points between those of the hulls.
    for demand in sorted(demands, key=lambda each: (each.job not in found, each.arrival)):
        point = demand.find_point(found.get(demand.job, 0) + free_bytes)
        if point is not None:
            take(demand.job, point.nbytes)
    return found


def _compare_lengths(demands: Sequence[Demand]) -> dict[int, float]:
    """Return the root of the byte-seconds that each job still takes, relative to the mean; 1 if unknown."""
    areas = {
        each.job: each.steps_left * min(point.nbytes * point.step_seconds for point in each.front)
        for each in demands
        if each.steps_left
    }
    mean = sum(areas.values()) / max(1, len(areas))
    return {each.job: math.sqrt(areas.get(each.job, mean) / mean) if mean else 1.0 for each in demands}


def _leave_out(demand: Demand, share: float) -> Demand:
    """Return the demand without the points at which more than a share of the compute repeats ops."""
    least_busy_seconds = demand.front[-1].busy_seconds
    front = tuple(each for each in demand.front if each.busy_seconds * (1 - share) <= least_busy_seconds)
    return dataclasses.replace(demand, front=front)


def _find_useful_work(demands: Sequence[Demand], split: dict[int, int]) -> float:
    """Return the seconds of compute a second that repeat nothing."""
    useful = load = 0.0
    for demand in demands:
        point = demand.find_point(split.get(demand.job, 0))
        if point is not None and point.step_seconds:
            useful += demand.front[-1].busy_seconds / point.step_seconds
            load += point.busy_seconds / point.step_seconds
    return useful / max(1.0, load)
