"""Does more memory ever make a plan slower? Plans of one strategy within 100 budgets of each model.

    python benchmarks/monotone.py [--models ResNet-50 ...] [--hardware v100] [--strategy auto] [--budgets 100]
        [--cache FOLDER] [--output FILE.json] [--minutes 9] [--check]

Budgets at equal distances from the smallest one that works to the plain step's peak, planned each on its own and then
evened out as `planner.comparison.frontier` does it. Prints how many of the former, and every one of the latter, are
slower than within a smaller budget, or have a lower peak; --check makes the latter an exit code of 1. A run goes on
from what --output has already.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from league import Slice, add_options, find_job, read_results, save_results
from standings import find_reversals

from elbowroom.planner.comparison.frontier import choose
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.problem import pose

Job = dict[str, Any]


def list_budgets(floor_bytes: int, peak_bytes: int, count: int) -> list[int]:
    """So many budgets, both ends included."""
    return [floor_bytes + (peak_bytes - floor_bytes) * index // (count - 1) for index in range(count)]


def run(job: Job, options: argparse.Namespace, slice_: Slice) -> bool:
    """Plan within one budget after the other; whether all of them are there."""
    if len(job["plans"]) == options.budgets:
        return True
    trace, costs = find_job(job["model"], job["hardware"], options.cache)
    problem = pose(trace, costs, 1)
    budgets = list_budgets(problem.floor.peak_bytes, problem.plain.peak_bytes, options.budgets)
    facts = {"trace_digest": costs.trace_digest, "plain_seconds": problem.plain.step_seconds}
    if any(job.get(name, value) != value for name, value in facts.items()):
        job["plans"] = []  # of another step
    job |= facts
    for budget in budgets[len(job["plans"]) :]:
        longest = max((plan["planning_seconds"] for plan in job["plans"]), default=0.0)
        if not slice_.has(longest):
            return False
        made = attempt(trace, costs, budget, job["strategy"])
        job["plans"].append({
            "budget_bytes": budget,
            "planning_seconds": made.planning_seconds,
            "peak_bytes": None if made.outcome is None else made.outcome.peak_bytes,
            "step_seconds": None if made.outcome is None else made.outcome.step_seconds,
        })  # fmt: skip
    return True


def even_out(plans: list[Job]) -> list[Job]:
    """Each budget with the best of all plans that are within it."""
    results = [None if plan["peak_bytes"] is None else (plan["peak_bytes"], plan["step_seconds"]) for plan in plans]
    chosen = choose(results, [plan["budget_bytes"] for plan in plans])
    return [
        plan if place is None else {**plans[place], "budget_bytes": plan["budget_bytes"]}
        for plan, place in zip(plans, chosen, strict=True)
    ]


def main() -> None:
    """Run, print what is wrong, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ["v100"])
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--budgets", type=int, default=100)
    options = parser.parse_args()
    results = read_results(options.output)
    slice_ = Slice(options.minutes)
    wrong = 0
    for model in options.models:
        for hardware in options.hardware:
            key = {"model": model, "hardware": hardware, "strategy": options.strategy, "budgets": options.budgets}
            job = next((each for each in results if each.items() >= key.items()), None)
            if job is None:
                job = {**key, "plans": []}
                results.append(job)
            begin = time.perf_counter()
            try:
                complete = slice_.has(0) and run(job, options, slice_)
            finally:
                save_results(options.output, results)
            alone, violations = find_reversals(job["plans"]), find_reversals(even_out(job["plans"]))
            state = "" if complete else f", {len(job['plans'])} of {options.budgets} budgets so far"
            count = f"{len(violations)} violations ({len(alone)} before evening out)"
            print(f"{model} on {hardware}: {count} in {time.perf_counter() - begin:.0f} s{state}")
            print("".join(f"  {each}\n" for each in violations), end="", flush=True)
            wrong += len(violations) + (not complete)
    if options.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
