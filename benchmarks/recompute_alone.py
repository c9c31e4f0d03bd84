"""Recomputation alone, nothing moved: how far over its bound are the default and DTR?

    python benchmarks/recompute_alone.py [--models ResNet-50 ...] [--hardware v100] [--budgets 20%peak:90%peak:8]
        [--cache FOLDER] [--output FILE.json] [--minutes 9] [--check]

The default is `auto:moves=recompute`. DTR is simulated over the same step and costs with each of its scores, and the
best of them counts; it decides at every op and may evict what no plan can, but knows nothing of what comes. Both are
compared with the bound on plans that only recompute. A run goes on from what --output has already. With --check the
exit code is 1 unless auto's mean excess over the bound is at most half of DTR's, over the cells where both finish.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from dtr_simulator import Ending, Score, run_online
from league import Slice, add_options, find_job, read_results, save_results

from elbowroom.cli.lists import read_budgets
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.problem import pose

Cell = dict[str, Any]
WHOLE = 1 << 40


def measure(trace: Trace, costs: Costs, share: float) -> Cell:
    """One model within one budget."""
    problem = pose(trace, costs, int(share * pose(trace, costs, 1).plain.peak_bytes))
    made = attempt(trace, costs, problem.budget_bytes, "auto:moves=recompute")
    plain = problem.plain.step_seconds
    online: dict[str, float | None] = {}
    for score in Score:
        outcome = run_online(trace, costs, problem.budget_bytes, score=score)
        online[str(score)] = plain + outcome.recompute_seconds if outcome.ending is Ending.FINISHED else None
    return {
        "share": share,
        "budget_bytes": problem.budget_bytes,
        "plain_seconds": plain,
        "bound_seconds": find_bound(problem).cover_seconds
        if problem.floor.peak_bytes <= problem.budget_bytes
        else None,
        "auto_seconds": None if made.outcome is None else made.outcome.step_seconds,
        "planning_seconds": made.planning_seconds,
        "dtr_seconds": online,
    }


def find_excesses(cell: Cell) -> tuple[float | None, float | None]:
    """Of auto and of DTR over the bound; None where one does not finish."""
    bound = cell["bound_seconds"]
    finished = [seconds for seconds in cell["dtr_seconds"].values() if seconds is not None]
    if not bound:
        return None, None
    own = None if cell["auto_seconds"] is None else cell["auto_seconds"] / bound - 1
    return own, min(finished) / bound - 1 if finished else None


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ["v100"])
    parser.add_argument("--budgets", default="20%peak:90%peak:8")
    options = parser.parse_args()
    shares = [budget / WHOLE for budget in read_budgets(options.budgets, peak_bytes=WHOLE)]
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model in options.models:
        for hardware in options.hardware:
            for share in shares:
                key = {"model": model, "hardware": hardware, "share": share}
                if any(cell.items() >= key.items() for cell in results) or not slice_.has(0):
                    continue
                results.append({**key, **measure(*find_job(model, hardware, options.cache), share)})
                save_results(options.output, results)
                own, other = find_excesses(results[-1])
                shown = ["-" if each is None else f"{each:.2%}" for each in (own, other)]
                print(f"{model:13} {hardware:8} {share:5.0%}  auto {shown[0]:>8}  DTR {shown[1]:>8}", flush=True)
    both = [pair for pair in map(find_excesses, results) if None not in pair]
    if not both:
        return
    own, other = (statistics.mean(each for each in side if each is not None) for side in zip(*both, strict=True))
    print(f"mean excess over the bound in {len(both)} cells: auto {own:.2%}, DTR {other:.2%}")
    if options.check and own > other / 2:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
