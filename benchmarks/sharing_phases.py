"""By how much shifted steps lower what several real jobs hold together.

    python benchmarks/sharing_phases.py [--hardware a100] [--output FILE]

Each step of `sharing_fronts.py` is captured on fake tensors and priced for a shipped profile; its memory over time is
that of the plain step, and that of a plan (`auto`) half-way from the smallest budget to the plain peak. Every pair of
jobs is aligned (`sharing/alignment.py`), identical ones too. `gain`: part of the sum of both peaks that shifts save if
every step keeps its length, and if steps may be 5 % of the period early or late. `slower`: by how much the job with the
shorter step is slowed down, since it waits for the other one at each boundary; pairs of very different steps would
rather run unaligned.

`worth`: the sum of the paces of both jobs (`sharing_fronts.py`) on a device of 50 to 80 % of the sum of their plain
peaks, if shifts that allow for late steps made it that much larger, by that without shifts. No wait is counted.
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
from sharing_lists import load_fronts
from writing import write_results

import elbowroom
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.forecast import Forecast
from elbowroom.planner.problem import pose
from elbowroom.sharing.alignment import SLOTS, StepCurve, align
from elbowroom.workloads import build

LATE_SHARE = 0.05
DEVICE_SHARES = (0.5, 0.6, 0.7, 0.8)


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


def find_pace(fronts: list[list[list[float]]], device_bytes: float) -> float:
    """Return the largest sum of paces of two jobs on a device; 0 if they do not fit."""
    pairs = itertools.product(*fronts)
    fitting = [pair for pair in pairs if sum(point[0] for point in pair) <= device_bytes]
    return max((sum(front[-1][1] / point[1] for front, point in zip(fronts, pair, strict=True)) for pair in fitting),
               default=0.0)  # fmt: skip


def find_worth(fronts: list[list[list[float]]], gain: float) -> list[float]:
    """Return by how much shifts raise the sum of paces, for each size of the device on which both jobs fit."""
    found = []
    for share in DEVICE_SHARES:
        device_bytes = share * sum(front[-1][0] for front in fronts)
        if pace := find_pace(fronts, device_bytes):
            found.append(find_pace(fronts, device_bytes / (1 - gain)) / pace)
    return found


def main() -> None:
    """Align all pairs, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hardware", default="a100")
    parser.add_argument("--output")
    options = parser.parse_args()
    curves = {spec: find_curves(spec, given, options.hardware) for spec, given in SPECS}
    fronts = {each["spec"]: each["front"] for each in load_fronts()}
    rows: list[dict[str, Any]] = []
    for kind in ("plain", "planned"):
        for one, other in itertools.combinations_with_replacement(curves, 2):
            pair = [curves[one][kind], curves[other][kind]]
            exact, late = align(pair), align(pair, LATE_SHARE)
            rows.append({
                "kind": kind, "jobs": [one, other], "gain": exact.gain_bytes / exact.sum_bytes,
                "late_gain": late.gain_bytes / late.sum_bytes,
                "worth": find_worth([fronts[one], fronts[other]], late.gain_bytes / late.sum_bytes),
                "slower": exact.period_seconds / min(each.step_seconds for each in pair) - 1,
            })  # fmt: skip
        for name, chosen in (("identical", True), ("different", False)):
            found = [row for row in rows if row["kind"] == kind and (row["jobs"][0] == row["jobs"][1]) is chosen]
            gains, late_gains, slower = ([row[key] for row in found] for key in ("gain", "late_gain", "slower"))
            worth = [each for row in found for each in row["worth"]]
            print(
                f"{kind}, {name} jobs: gain {statistics.median(gains):.0%} ({min(gains):.0%} to {max(gains):.0%}), "
                f"with late steps {statistics.median(late_gains):.0%}, worth {statistics.median(worth):.3f} "
                f"({min(worth):.3f} to {max(worth):.3f}), slower by {statistics.median(slower):.0%}"
            )
    write_results(options.output, rows)


if __name__ == "__main__":
    main()
