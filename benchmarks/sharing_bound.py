"""Lower bound on the makespan of a job list: no schedule on that device is shorter, even one that knows the future."""

from __future__ import annotations

import itertools

from elbowroom.sharing.job_list import JobList, ListedJob

Line = list[tuple[float, float]]
"""Lower convex hull of (seconds per step, byte-seconds per step), by increasing seconds."""


def find_makespan_bound(jobs: JobList) -> float:
    """Return seconds that any schedule takes, to a millionth.

    A job that arrives at a and ends by T takes at most (T - a) / steps seconds per step in the mean, so it takes the
    byte-seconds of some mixture of its points that is as fast. For every t, the jobs that arrive from t on have no more
    than the device's bytes times (T - t), and no more compute than T - t. Bytes that lie idle, states that move, and
    jobs that cannot be cut to fit are left out.
    """
    lines = [_find_line(job) for job in jobs.jobs]
    low = max(job.arrival_seconds + job.plain_seconds for job in jobs.jobs)
    if _fits(jobs, lines, low):
        return low
    high = 2 * low
    while not _fits(jobs, lines, high):
        high *= 2
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(jobs, lines, middle) else (middle, high)
    return low


def _find_line(job: ListedJob) -> Line:
    line: Line = []
    for seconds, area in sorted((each.step_seconds, each.step_seconds * each.nbytes) for each in job.front):
        if line and area >= line[-1][1]:
            continue
        while len(line) > 1 and _slope(line[-2], line[-1]) >= _slope(line[-2], (seconds, area)):
            line.pop()
        line.append((seconds, area))
    return line


def _slope(begin: tuple[float, float], end: tuple[float, float]) -> float:
    return (end[1] - begin[1]) / (end[0] - begin[0])


def _find_area(line: Line, seconds: float) -> float:
    """Return the least byte-seconds of a step that takes some seconds in the mean."""
    for begin, end in itertools.pairwise(line):
        if seconds < end[0]:
            return begin[1] + _slope(begin, end) * max(0.0, seconds - begin[0])
    return line[-1][1]


def _fits(jobs: JobList, lines: list[Line], makespan: float) -> bool:
    found = []
    for job, line in zip(jobs.jobs, lines, strict=True):
        area = job.steps * _find_area(line, (makespan - job.arrival_seconds) / job.steps)
        found.append((job.arrival_seconds, area, job.steps * min(each.busy_seconds for each in job.front)))
    for arrival, _, _ in found:
        late = [each for each in found if each[0] >= arrival]
        if sum(area for _, area, _ in late) > jobs.device_bytes * (makespan - arrival):
            return False
        if sum(busy for _, _, busy in late) > makespan - arrival:
            return False
    return True
