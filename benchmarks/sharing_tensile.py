"""TENSILE's jobs (batch 2, Adam) on a simulated card of its time: its saving and overhead beside ours.

    python benchmarks/sharing_tensile.py [--hardware rtx2080ti] [--points 10] [--only MODEL ...] [--output FILE]

TENSILE's figures are development logs of its authors for 1 to 3 identical jobs: saving of peak memory (warm and cold
start) and overhead. Ours: leases of identical jobs are equal, and each job has the same part of compute and link, so
the saving is that of one job at the smallest budget whose step takes at most TENSILE's overhead. Its peaks include
the context of the driver, once for all jobs: `with_context` adds the same to ours, and is what compares to theirs.

What a copy costs depends on how long the step computes. The steps of the logs are slower than the card: a step at batch
16 takes several times what the card's figures predict. So each model is planned at two speeds: that of the card, and
that of the logs, where all op times are longer by the factor found at batch 16.

    cold    planned with the op times that the card's figures predict, before any step has run
    warm    planned again with the op times of the steps; the better of both plans is kept

Both are simulated with the op times of the steps, so at the card's own speed they are the same.

`mixed`: one job of each model, 50 steps, at random arrivals, within a share of the most that plain jobs hold together.
Saving is that share, overhead the mean time from arrival to end over that of plain jobs. The authors ran it too; no
figures of it are public.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import random
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from state_planning import capture_in_groups
from tensile_logs import LOGGED_SECONDS, slow_down
from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.options import find_managed
from elbowroom.planner.problem import pose
from elbowroom.planner.slicing.choice import Slices
from elbowroom.sharing.job_list import read_job_list
from elbowroom.sharing.simulation import simulate_sharing

MODELS: dict[str, tuple[str, tuple[tuple[float, float, float], ...]]] = {
    "VGG-16": ("torchvision:vgg16", ((0.2174, 0.1769, 0.143), (0.2149, 0.1870, 0.1613), (0.1982, 0.1540, 0.1691))),
    "Inception-v3": (
        "timm:inception_v3",
        ((0.3168, 0.0748, 0.2646), (0.2753, 0.1344, 0.2918), (0.2740, 0.1878, 0.1671)),
    ),
    "Inception-v4": (
        "timm:inception_v4",
        ((0.5019, 0.3538, 0.2496), (0.4667, 0.3236, 0.1469), (0.4388, 0.3472, 0.3755)),
    ),
    "ResNet-50": (
        "torchvision:resnet50",
        ((0.2628, 0.0415, 0.3504), (0.3427, 0.1523, 0.4030), (0.2870, 0.1579, 0.3779)),
    ),
    "DenseNet-121": (
        "torchvision:densenet121",
        ((0.3973, 0.1575, 0.148), (0.2452, 0.1095, 0.1161), (0.2084, 0.1221, 0.0270)),
    ),
}
"""Spec, and (warm saving, cold saving, overhead) of TENSILE for 1, 2 and 3 jobs."""


CONTEXT_BYTES = 799 << 20
"""What TENSILE's code takes the driver's context for."""

STRATEGIES = ("tensile", "capuchin", "auto:effort=0.1")
STEPS = 50
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5)
Point = tuple[int, float]


def find_factor(name: str, profile: HardwareProfile) -> float:
    """Return by how much the logged steps are slower than the card's figures predict."""
    trace = capture_in_groups(MODELS[name][0], {"batch": 16})
    return LOGGED_SECONDS[name] / pose(trace, elbowroom.price(trace, profile), 1).plain.step_seconds


def make_plans(trace: Trace, costs: Costs, budgets: list[int]) -> list[Plan]:
    """Return the plans of each strategy within each budget, as far as there are any."""
    found = []
    for budget in budgets:
        for strategy in STRATEGIES:
            with contextlib.suppress(Infeasible):
                made = elbowroom.plan(
                    trace, costs, budget, strategy=strategy, manages="everything", slices=Slices.NONE
                )  # fmt: skip
                found.append(made)
    return found


def find_points(trace: Trace, costs: Costs, plans: list[Plan]) -> list[Point]:
    """Return (bytes, seconds) of each plan."""
    forecasts = [elbowroom.simulate(trace, costs, each) for each in plans]
    return sorted((each.peak_bytes, each.step_seconds) for each in forecasts)


def find_saving(points: list[Point], plain: Point, overhead: float) -> tuple[float, float]:
    """Return the largest saving of bytes at no more than an overhead, and its overhead."""
    fitting = [each for each in points if each[1] <= (1 + overhead) * plain[1]]
    nbytes, seconds = min([*fitting, plain])
    return 1 - nbytes / plain[0], max(0.0, seconds / plain[1] - 1)


def measure(name: str, hardware: str, count: int) -> dict[str, Any]:
    """Return our front of one model, and our saving beside TENSILE's."""
    spec, theirs = MODELS[name]
    profile = load_shipped(hardware)
    factor = find_factor(name, profile)
    trace = capture_in_groups(spec, {"batch": 2})
    card = elbowroom.price(trace, profile)
    logs = slow_down(card, factor)
    peak = pose(trace, card, 1).plain.peak_bytes
    least = pose(trace, card, 1, manages=find_managed("tensile", "everything")).floor.peak_bytes
    budgets = [least + (peak - least) * place // (count - 1) for place in range(count)]
    predicted = make_plans(trace, card, budgets)
    replanned = make_plans(trace, logs, budgets)
    points = {
        "card": find_points(trace, card, predicted), "cold": find_points(trace, logs, predicted),
        "warm": find_points(trace, logs, [*predicted, *replanned]),
    }  # fmt: skip
    card_plain, logs_plain = ((peak, pose(trace, costs, 1).plain.step_seconds) for costs in (card, logs))
    rows = []
    for jobs, (warm, cold, overhead) in enumerate(theirs, start=1):
        row: dict[str, Any] = {
            "jobs": jobs, "tensile_warm": warm, "tensile_cold": cold, "tensile_overhead": overhead,
        }  # fmt: skip
        for kind, found in points.items():
            plain = card_plain if kind == "card" else logs_plain
            row[kind], row[f"{kind}_overhead"] = find_saving(found, plain, overhead)
            row[f"{kind}_with_context"] = row[kind] * jobs * peak / (jobs * peak + CONTEXT_BYTES)
        rows.append(row)
    return {
        "model": name, "hardware": hardware, "plain_bytes": peak, "factor": factor,
        "plain_seconds": {"card": card_plain[1], "logs": logs_plain[1]}, "points": points, "rows": rows,
    }  # fmt: skip


def list_jobs(found: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return one job of each model at the speed of the logs, arriving while the others run."""
    draw = random.Random(seed)
    jobs = []
    for each in draw.sample(found, len(found)):
        plain = each["plain_seconds"]["logs"]
        points = [*each["points"]["warm"], (each["plain_bytes"], plain)]
        front = [[nbytes, seconds, min(seconds, plain)] for nbytes, seconds in points]
        arrival = draw.uniform(0, STEPS * plain)
        jobs.append({"name": each["model"], "steps": STEPS, "front": front, "arrival_seconds": arrival})
    return jobs


def mix(found: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Return saving and overhead of the mixed jobs within several shares of what plain ones hold."""
    jobs = list_jobs(found, seed)
    plain = [{**job, "front": job["front"][-1:]} for job in jobs]
    alone = simulate_sharing(read_job_list({"device_bytes": 1 << 50, "jobs": plain}), "tensile")
    rows = []
    for policy in ("tensile", "marginal"):
        for share in SHARES:
            device_bytes = int(alone.highest_bytes * share)
            if device_bytes < max(min(job["front"])[0] for job in jobs):
                continue  # the largest job does not fit at all
            outcome = simulate_sharing(read_job_list({"device_bytes": device_bytes, "jobs": jobs}), policy)
            overhead = statistics.mean(
                (ours.finish_seconds - ours.arrival_seconds) / (theirs.finish_seconds - theirs.arrival_seconds) - 1
                for ours, theirs in zip(outcome.jobs, alone.jobs, strict=True)
            )
            rows.append({
                "seed": seed, "policy": policy, "share": share,
                "saving": 1 - outcome.highest_bytes / alone.highest_bytes,
                "overhead": overhead, "makespan": outcome.makespan_seconds / alone.makespan_seconds - 1,
            })  # fmt: skip
    return rows


def main() -> None:
    """Measure all models, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="rtx2080ti")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--output")
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    for name in options.only or MODELS:
        results.append(measure(name, options.hardware, options.points))
        print(f"{name}: logged steps take {results[-1]['factor']:.1f} times as long", flush=True)
        for row in results[-1]["rows"]:
            ours = ", ".join(f"{row[kind + '_with_context']:.1%} {kind}" for kind in ("warm", "cold", "card"))
            print(
                f"  {row['jobs']} jobs: TENSILE saves {row['tensile_warm']:.1%} warm, {row['tensile_cold']:.1%} cold, "
                f"for {row['tensile_overhead']:.1%}; ours {ours}",
                flush=True,
            )
    mixed = [row for seed in range(20) for row in mix(results, seed)]
    for policy in ("tensile", "marginal"):
        for share in SHARES:
            rows = [row for row in mixed if (row["policy"], row["share"]) == (policy, share)]
            if rows:
                overhead = statistics.median(row["overhead"] for row in rows)
                print(f"mixed, {policy}: {1 - share:.0%} less memory costs {overhead:.1%} ({len(rows)} of 20 orders)")
    write_results(options.output, [*results, {"mixed": mixed}])


if __name__ == "__main__":
    main()
