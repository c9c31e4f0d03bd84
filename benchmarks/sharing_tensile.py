"""TENSILE's jobs (batch 2, Adam) on a simulated card of its time: its saving and overhead beside ours.

    python benchmarks/sharing_tensile.py [--hardware rtx2080ti] [--points 10] [--output FILE]

TENSILE's figures are development logs of its authors for 1 to 3 identical jobs: saving of peak memory (warm and cold
start) and overhead. Ours: leases of identical jobs are equal, so the saving is that of one job at the smallest budget
of its front whose step takes at most TENSILE's overhead, for each number of jobs. All of it is a cold start: no step
has run, and op times are predicted. Peaks are without the context of the driver, which TENSILE's include.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_shipped
from elbowroom.planner.comparison.strategies_compared import compare, even_out, find_front
from elbowroom.planner.options import find_managed
from elbowroom.planner.problem import pose
from elbowroom.workloads import build

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


def measure(name: str, hardware: str, count: int) -> dict[str, Any]:
    """Return our front of one model, and our saving beside TENSILE's."""
    spec, theirs = MODELS[name]
    workload = build(spec, batch=2, optimizer="adamw")
    whole = elbowroom.capture(workload.step, workload.model, workload.optimizer)
    profile = load_shipped(hardware)
    plain = pose(whole, elbowroom.price(whole, profile), 1).plain
    trace = elbowroom.capture(workload.step, workload.model, workload.optimizer, memory_budget=plain.peak_bytes // 2)
    costs = elbowroom.price(trace, profile)
    managed = find_managed("tensile", "everything")
    least = pose(trace, costs, 1, manages=managed).floor.peak_bytes
    budgets = [least + (plain.peak_bytes - least) * place // (count - 1) for place in range(count)]
    entries = even_out(tuple(compare(trace, costs, budgets, ["tensile", "capuchin"], manages="everything")))
    points = [
        (each.outcome.peak_bytes, each.outcome.step_seconds) for each in find_front(entries) if each.outcome is not None
    ]
    rows = []
    for jobs, (warm, cold, overhead) in enumerate(theirs, start=1):
        fitting = [(nbytes, seconds) for nbytes, seconds in points if seconds <= (1 + overhead) * plain.step_seconds]
        nbytes, seconds = min(fitting, default=(plain.peak_bytes, plain.step_seconds))
        rows.append({
            "jobs": jobs, "tensile_warm": warm, "tensile_cold": cold, "tensile_overhead": overhead,
            "saving": 1 - nbytes / plain.peak_bytes, "overhead": max(0.0, seconds / plain.step_seconds - 1),
        })  # fmt: skip
    return {"model": name, "hardware": hardware, "plain_bytes": plain.peak_bytes, "points": points, "rows": rows}


def main() -> None:
    """Measure all models, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="rtx2080ti")
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--output")
    options = parser.parse_args()
    results = []
    for name in MODELS:
        results.append(measure(name, options.hardware, options.points))
        for row in results[-1]["rows"]:
            print(
                f"{name} x{row['jobs']}: TENSILE saves {row['tensile_warm']:.1%} warm, {row['tensile_cold']:.1%} cold, "
                f"for {row['tensile_overhead']:.1%}; ours {row['saving']:.1%} for {row['overhead']:.1%}",
                flush=True,
            )
    write_results(options.output, results)


if __name__ == "__main__":
    main()
