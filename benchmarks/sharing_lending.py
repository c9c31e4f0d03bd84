"""What jobs gain that lend, while they evaluate, what they do not use of their leases; on a virtual clock.

    python benchmarks/sharing_lending.py [--seeds 20] [--output FILE]

Each job of a list evaluates about once a minute, for 5 to 40 % of its time, with no more on the device than the floor
of its steps. `lists`: those of `sharing_policies.py`, 24 jobs on 12 GiB. `pairs`: two jobs of the same length that
arrive together, on a device of 60 % of the sum of their plain peaks. The ratio is the makespan of jobs that keep their
leases by that of jobs that lend: above 1 lending is better.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from sharing_lists import load_fronts, make_list
from writing import write_results

from elbowroom.sharing.job_list import Evaluation, JobList, read_job_list
from elbowroom.sharing.simulation import simulate_sharing

POLICIES = ("marginal", "fair")
SHARES = (0.05, 0.4)
SECONDS_BETWEEN = 60.0
PAIR_SHARE = 0.6
PAIR_SECONDS = 1200.0


def add_evaluations(jobs: JobList, seed: int) -> JobList:
    """Return the same jobs, with evaluations."""
    draw = random.Random(seed)
    listed = []
    for job in jobs.jobs:
        step_seconds, share = job.front[-1].step_seconds, draw.uniform(*SHARES)
        steps = max(1, round(SECONDS_BETWEEN / step_seconds))
        seconds = steps * step_seconds * share / (1 - share)
        evaluation = Evaluation(steps=steps, seconds=seconds, nbytes=job.front[0].nbytes)
        listed.append(dataclasses.replace(job, evaluation=evaluation))
    return dataclasses.replace(jobs, jobs=tuple(listed))


def make_pair(seed: int) -> JobList:
    """Return two jobs that arrive together."""
    pair = random.Random(seed).sample([each for each in load_fronts() if len(each["front"]) > 2], 2)
    return read_job_list({
        "device_bytes": int(PAIR_SHARE * sum(each["front"][-1][0] for each in pair)),
        "jobs": [{
            "name": each["spec"], "front": [[nbytes, seconds, 0.0] for nbytes, seconds, _ in each["front"]],
            "steps": max(1, round(PAIR_SECONDS / each["front"][-1][1])), "state_bytes": each["state_bytes"],
        } for each in pair],
    })  # fmt: skip


def measure(jobs: JobList, policy: str) -> dict[str, Any]:
    """Simulate a list with lending and without."""
    kept, lent = (simulate_sharing(jobs, policy, lends=lends) for lends in (False, True))
    return {
        "policy": policy, "ratio": kept.makespan_seconds / lent.makespan_seconds,
        "slowdown": [kept.mean_slowdown, lent.mean_slowdown], "grants": [kept.grants, lent.grants],
        "pauses": [sum(job.pauses for job in each.jobs) for each in (kept, lent)],
    }  # fmt: skip


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output")
    options = parser.parse_args()
    results = []
    for kind in ("pairs", "lists"):
        for policy in POLICIES:
            rows = []
            for seed in range(options.seeds):
                jobs = make_pair(seed) if kind == "pairs" else read_job_list(make_list(seed))
                rows.append({"kind": kind, "seed": seed, **measure(add_evaluations(jobs, seed), policy)})
            ratios = [row["ratio"] for row in rows]
            slowdowns = [statistics.mean(row["slowdown"][place] for row in rows) for place in (0, 1)]
            print(f"{kind} under {policy}: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), "
                  f"mean slowdown {slowdowns[0]:.2f} and {slowdowns[1]:.2f}", flush=True)  # fmt: skip
            results += rows
    write_results(options.output, results)


if __name__ == "__main__":
    main()
