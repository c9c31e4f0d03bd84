"""Bytes go where they gain most: the split with the largest sum of pace, by weight and by time left.

Each job runs at one point of its front, or waits. Of all such choices that fit, the one with the largest sum of
weight * seconds left * pace is taken: a knapsack with one choice a job, solved exactly for bytes in units of a 512th of
the device. Seconds left are counted at the job's fastest. So long jobs are not left to the end, where they would not
fit together, and small ones fill what is left beside them. Jobs that do not say how long they still run count as the
mean of the others. Protected and due jobs run, at their floors or above, so a job waits at most n (q + 2 s).

If the jobs of that split keep the device busy all the time, bytes are not the only thing that is short. Then splits are
tried in which time on the device has a price, and the one with most progress is taken.

Source: multiple-choice knapsack by dynamic programming; H. Kellerer, U. Pferschy, D. Pisinger, "Knapsack Problems",
2004, section 11.5. Longest job first: R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math.
17(2), 1969.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from elbowroom.sharing.demand import Demand, FrontPoint, list_required

UNITS = 512
"""Units in which bytes are counted. Each job is counted as up to a unit too large."""

PRICES = (0.5, 1.0, 2.0)
"""Prices of time on a busy device that are tried, relative to the mean progress in it."""

STAYING = 1.25
"""Factor on the gain of running jobs, since it takes time to pause them."""


def allot(demands: Sequence[Demand], capacity_bytes: int) -> dict[int, int]:
    """Choose a point for each job, or none."""
    required = {each.job for each in list_required(demands, capacity_bytes)}
    worth = find_worth(demands)
    best = _choose(demands, worth, required, capacity_bytes, 0.0)
    progress, load = _find_progress(demands, worth, best)
    if load > 1:
        most = progress / max(1.0, load)
        for price in PRICES:
            found = _choose(demands, worth, required, capacity_bytes, price * progress / load)
            priced_progress, priced_load = _find_progress(demands, worth, found)
            if priced_progress / max(1.0, priced_load) > most:
                best, most = found, priced_progress / max(1.0, priced_load)
    return _spend_rest(demands, best, capacity_bytes, admits=load <= 1)


def find_worth(demands: Sequence[Demand]) -> dict[int, float]:
    """Return the worth of each job's pace."""
    seconds = {each.job: each.plain_seconds_left for each in demands if each.steps_left is not None}
    mean = sum(seconds.values()) / len(seconds) if seconds else 1.0
    return {each.job: each.weight * (seconds.get(each.job, mean) / mean if mean else 1.0) for each in demands}


def _choose(
    demands: Sequence[Demand], worth: Mapping[int, float], required: set[int], capacity_bytes: int, price: float
) -> dict[int, int]:
    """Return the bytes of each job in the best choice.

    Args:
        required: jobs that must run.
        price: of all time on the device.
    """
    unit = -(-capacity_bytes // UNITS)
    # The floors of required jobs are taken out first: they fit together, though perhaps not in whole units.
    taken = {each.job: each.floor_bytes if each.job in required else 0 for each in demands}
    room = (capacity_bytes - sum(taken.values())) // unit
    most = np.zeros(room + 1)  # gain of the best choice so far within so many units
    chosen: list[tuple[Demand, list[int], list[int], np.ndarray]] = []
    for demand in sorted(
        demands, key=lambda each: -each.arrival
    ):  # of equal choices the one with earlier jobs is found
        sizes = [-(-(point.nbytes - taken[demand.job]) // unit) for point in demand.front]
        fitting = [place for place, size in enumerate(sizes) if size <= room]
        gains = np.full((len(fitting) + 1, room + 1), -np.inf)
        for row, place in enumerate(fitting):
            size = sizes[place]
            gain = _find_gain(demand, demand.front[place], worth[demand.job], price)
            gains[row, size:] = most[: room + 1 - size] + gain
        if demand.job not in required:
            gains[-1] = most[: room + 1]
        chosen.append((demand, fitting, sizes, gains.argmax(axis=0)))
        most = gains.max(axis=0)
    found: dict[int, int] = {}
    for demand, fitting, sizes, rows in reversed(chosen):
        if (row := int(rows[room])) < len(fitting):
            found[demand.job] = demand.front[fitting[row]].nbytes
            room -= sizes[fitting[row]]
    return found


def _find_gain(demand: Demand, point: FrontPoint, worth: float, price: float) -> float:
    pace = demand.front[-1].step_seconds / point.step_seconds
    staying = STAYING if demand.is_running else 1.0
    return worth * pace * staying - price * min(1.0, point.busy_seconds / point.step_seconds)


def _find_progress(
    demands: Sequence[Demand], worth: Mapping[int, float], split: Mapping[int, int]
) -> tuple[float, float]:
    """Return the sum of worth * pace, and that of the loads."""
    running = [each for each in demands if each.job in split]
    progress = sum(worth[each.job] * each.find_pace(split[each.job]) for each in running)
    return progress, sum(each.find_load(split[each.job]) for each in running)


def _spend_rest(
    demands: Sequence[Demand], split: dict[int, int], capacity_bytes: int, *, admits: bool
) -> dict[int, int]:
    """Spend what rounding has left on larger points, by arrival."""
    free_bytes = capacity_bytes - sum(split.values())
    for demand in sorted(demands, key=lambda each: (each.job not in split, each.arrival)):
        present_bytes = split.get(demand.job, 0)
        point = demand.find_point(present_bytes + free_bytes)
        if point is not None and point.nbytes > present_bytes and (present_bytes or admits):
            split[demand.job] = point.nbytes
            free_bytes -= point.nbytes - present_bytes
    return split
