"""Makespan of the broker's policies on seeded job lists of real fronts, on a virtual clock.

    python benchmarks/sharing_policies.py [--seeds 100] [--busy 0.05 0.35] [--output FILE]

`marginal` is compared to first come (`queue`: a job gets all that it can use, or waits), to an equal split into slots
(each as large as the largest floor needs, one job a slot, first come), and to `fair` (max-min, with turns). The ratio
is the makespan of the other by that of `marginal`: above 1 it is better. All are also compared to a lower bound
(`sharing_bound.py`): the ratio of `fair` to it is the most that any policy could reach against `fair`.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from sharing_bound import find_makespan_bound
from sharing_lists import BUSY_SHARES, make_list
from writing import write_results

from elbowroom.sharing.demand import find_point
from elbowroom.sharing.job_list import JobList, read_job_list
from elbowroom.sharing.simulation import simulate_sharing

OTHERS = ("fair", "queue", "slots")


def cut_into_slots(jobs: JobList) -> JobList:
    """Return the same jobs, each of which takes one of the largest number of equal slots in which all jobs run."""
    count = jobs.device_bytes // max(job.front[0].nbytes for job in jobs.jobs)
    slot_bytes = jobs.device_bytes // count
    cut = []
    for job in jobs.jobs:
        point = find_point(job.front, slot_bytes)
        assert point is not None
        cut.append(dataclasses.replace(job, front=(dataclasses.replace(point, nbytes=slot_bytes),)))
    return dataclasses.replace(jobs, jobs=tuple(cut))


def measure(seed: int, busy_shares: tuple[float, float]) -> dict[str, Any]:
    """Simulate one job list under all policies."""
    jobs = read_job_list(make_list(seed, busy_shares=busy_shares))
    row: dict[str, Any] = {"seed": seed, "bound_seconds": find_makespan_bound(jobs)}
    for policy in ("marginal", "fair", "queue", "tensile", "slots"):
        begin = time.perf_counter()
        listed = cut_into_slots(jobs) if policy == "slots" else jobs
        outcome = simulate_sharing(listed, "queue" if policy == "slots" else policy)
        row[policy] = {
            "makespan_seconds": outcome.makespan_seconds, "mean_waiting_seconds": outcome.mean_waiting_seconds,
            "mean_slowdown": outcome.mean_slowdown, "fairness": outcome.fairness, "idle_share": outcome.idle_share,
            "longest_wait_seconds": max(job.longest_wait_seconds for job in outcome.jobs),
            "simulation_seconds": time.perf_counter() - begin,
        }  # fmt: skip
    return row


def summarize(rows: list[dict[str, Any]], busy_shares: tuple[float, float]) -> dict[str, Any]:
    """Return the median and the least ratio of each other policy, and of the better of `queue` and `slots`."""
    found: dict[str, Any] = {"busy_shares": busy_shares, "lists": len(rows)}

    def ratio(row: dict[str, Any], other: str) -> float:
        return float(row[other]["makespan_seconds"] / row["marginal"]["makespan_seconds"])

    for other in (*OTHERS, "tensile"):
        ratios = [ratio(row, other) for row in rows]
        found[other] = {"median": statistics.median(ratios), "least": min(ratios)}
    for name, pair in (
        ("better of queue and slots", ("queue", "slots")),
        ("better of queue and fair", ("queue", "fair")),
    ):
        found[name] = {"least": min(min(ratio(row, each) for each in pair) for row in rows)}
    for policy in ("marginal", *OTHERS):
        ratios = [row[policy]["makespan_seconds"] / row["bound_seconds"] for row in rows]
        found[f"{policy} to the bound"] = {
            "median": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
        }  # fmt: skip
    return found


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--busy", type=float, nargs="+", default=[*BUSY_SHARES, 0.2, 0.8])
    parser.add_argument("--output")
    options = parser.parse_args()
    results = []
    for low, high in zip(options.busy[::2], options.busy[1::2], strict=True):
        rows = []
        for seed in range(options.seeds):
            rows.append(measure(seed, (low, high)))
            if seed % 10 == 9:
                print((low, high), summarize(rows, (low, high)), flush=True)
        results.append({**summarize(rows, (low, high)), "rows": rows})
    write_results(options.output, results)


if __name__ == "__main__":
    main()
