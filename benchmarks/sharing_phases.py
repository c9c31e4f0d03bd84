"""By how much shifted steps lower what several real jobs hold together.

    python benchmarks/sharing_phases.py [--hardware a100] [--output FILE]

Each step of `sharing_fronts.py` is captured on fake tensors and priced for a shipped profile; its memory over time is
that of the plain step, and that of a plan (`auto`) half-way from the smallest budget to the plain peak. Every pair of
jobs is aligned (`sharing/alignment.py`), identical ones too. `gain`: part of the sum of both peaks that shifts save if
every step keeps its length, and if steps may be 5 % of the period early or late. `slower`: by how much the job with the
shorter step is slowed down, since it waits for the other one at each boundary; pairs of very different steps would
rather run unaligned.
"""

from __future__ import annotations

import argparse
import itertools
import pathlib
import statistics
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from sharing_fronts import SPECS
from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.forecast import Forecast
from elbowroom.planner.problem import pose
from elbowroom.sharing.alignment import SLOTS, StepCurve, align
from elbowroom.workloads import build

LATE_SHARE = 0.05


def make_curve(forecast: Forecast) -> StepCurve:
    """Return the most bytes in each slot of a step."""
    levels = [0] * SLOTS
    spans = zip(itertools.pairwise(forecast.begin_seconds), forecast.live_bytes, strict=True)
    for (begin, end), nbytes in spans:
        first, last = (min(SLOTS - 1, int(SLOTS * each / forecast.step_seconds)) for each in (begin, end))
        for slot in range(first, last + 1):
            levels[slot] = max(levels[slot], nbytes)
    return StepCurve(step_seconds=forecast.step_seconds, levels=tuple(levels))


def find_curves(spec: str, options: dict[str, Any], hardware: str) -> dict[str, StepCurve]:
    """Return the curves of one step."""
    workload = build(spec, **options)
    trace = elbowroom.capture(workload.step, workload.model, workload.optimizer)
    costs = elbowroom.price(trace, load_shipped(hardware))
    problem = pose(trace, costs, 1)
    budget = (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2
    planned = elbowroom.plan(trace, costs, budget)
    return {"plain": make_curve(problem.plain), "planned": make_curve(elbowroom.simulate(trace, costs, planned))}


def main() -> None:
    """Align all pairs, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--output")
    options = parser.parse_args()
    curves = {spec: find_curves(spec, given, options.hardware) for spec, given in SPECS}
    rows = []
    for kind in ("plain", "planned"):
        for one, other in itertools.combinations_with_replacement(curves, 2):
            pair = [curves[one][kind], curves[other][kind]]
            exact, late = align(pair), align(pair, LATE_SHARE)
            rows.append({
                "kind": kind, "jobs": [one, other], "gain": exact.gain_bytes / exact.sum_bytes,
                "late_gain": late.gain_bytes / late.sum_bytes,
                "slower": exact.period_seconds / min(each.step_seconds for each in pair) - 1,
            })  # fmt: skip
        for name, chosen in (("identical", True), ("different", False)):
            found = [row for row in rows if row["kind"] == kind and (row["jobs"][0] == row["jobs"][1]) is chosen]
            gains, late_gains = ([row[key] for row in found] for key in ("gain", "late_gain"))
            print(
                f"{kind}, {name} jobs: gain {statistics.median(gains):.0%} ({min(gains):.0%} to {max(gains):.0%}), "
                f"with late steps {statistics.median(late_gains):.0%}"
            )
    write_results(options.output, rows)


if __name__ == "__main__":
    main()
