"""Fronts (bytes against seconds per step) of real training steps, for the benchmark of sharing.

    python benchmarks/sharing_fronts.py [--hardware a100] [--points 8] [--output FILE]

Each step is captured on fake tensors, priced for a shipped profile, and planned by `auto` within several budgets from
the smallest to its plain peak, with `planner.comparison`. A point is [bytes, seconds per step, seconds of compute].
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.trace import STATE_ROLES
from elbowroom.planner.comparison.smallest_budget import find_smallest
from elbowroom.planner.comparison.strategies_compared import compare, even_out, find_front
from elbowroom.workloads import build

SPECS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("torchvision:resnet50", {"batch": 32}),
    ("torchvision:vgg16", {"batch": 32}),
    ("torchvision:densenet121", {"batch": 16}),
    ("torchvision:mobilenet_v2", {"batch": 64}),
    ("torchvision:vit_b_16", {"batch": 16}),
    ("torchvision:resnet18", {"batch": 64}),
    ("transformers:gpt2", {"batch": 4, "sequence_length": 512}),
    ("transformers:bert-base-uncased", {"batch": 16, "sequence_length": 128}),
)


def find_job(spec: str, options: dict[str, Any], hardware: str, count: int) -> dict[str, Any]:
    """Return the front of one step, with its options."""
    begin = time.perf_counter()
    workload = build(spec, **options)
    trace = elbowroom.capture(workload.step, workload.model, workload.optimizer)
    costs = elbowroom.price(trace, load_shipped(hardware))
    plain = elbowroom.simulate(trace, costs, elbowroom.plan(trace, costs, 1 << 60, strategy="keep_all"))
    smallest_bytes = find_smallest(trace, costs)
    budgets = [smallest_bytes + (plain.peak_bytes - smallest_bytes) * place // (count - 1) for place in range(count)]
    entries = find_front(even_out(tuple(compare(trace, costs, budgets, ["auto"]))))
    outcomes = [entry.outcome for entry in entries if entry.outcome is not None]
    state_bytes = sum(each.nbytes for each in trace.storages if each.role in STATE_ROLES)
    return {
        "spec": spec, "options": options, "hardware": hardware,
        "plain_bytes": plain.peak_bytes, "smallest_bytes": smallest_bytes,
        "state_bytes": state_bytes, "planning_seconds": time.perf_counter() - begin,
        "front": [[each.peak_bytes, each.step_seconds, each.step_seconds - each.stall_seconds] for each in outcomes],
    }  # fmt: skip


def main() -> None:
    """Find all fronts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--points", type=int, default=8)
    parser.add_argument("--output")
    options = parser.parse_args()
    jobs = []
    for spec, given in SPECS:
        jobs.append(find_job(spec, given, options.hardware, options.points))
        print(spec, [(f"{point[0] / 2**30:.2f} GiB", f"{point[1]:.3f} s") for point in jobs[-1]["front"]], flush=True)
    write_results(options.output, jobs)


if __name__ == "__main__":
    main()
