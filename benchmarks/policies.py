"""Online policies side by side, on the models and budgets of the league: which is best, and what is planning worth?

    python benchmarks/policies.py [--models ResNet-50 ...] [--hardware v100 ...] [--budgets 30%peak:90%peak:7]
        [--policies predictive,delta,...] [--cache FOLDER] [--plans benchmarks/results/planners.json]
        [--output FILE.json] [--minutes 9] [--check]

Each policy runs two steps in simulation; the first finds nothing learnt, the second what the first one taught. Beside
them the planned step of `auto`, from the results of `planners.py`. A run goes on from what --output has already. With
--check the exit code is 1 unless `predictive` has the shortest second steps, summed up over the cells that all finish
(to 0.1 %), on at least nine of ten models, and takes at most 10 % longer than `auto` on each in the median.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

from league import Slice, add_options, find_job, read_results, save_results

from elbowroom._family import names
from elbowroom.cli.lists import read_budgets
from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import pose
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.simulator.online import simulate_policy

WHOLE = 1 << 40
PATIENCE = 30.0
"""Plain steps that a step may take."""

OWN, MOST_OVER_PLAN, EQUAL = "predictive", 1.10, 1.001
Cell = dict[str, Any]


def run_policy(trace: Trace, costs: Costs, budget_bytes: int, policy: str, plain_seconds: float) -> list[float | None]:
    """Seconds of a first and of a second step; None from where it found no room, or took too long."""
    history, found = AccessHistory(), list[float | None]()
    for _ in range(2):
        try:
            course = simulate_policy(
                trace, costs, budget_bytes, policy=policy, history=history, most_seconds=PATIENCE * plain_seconds
            )
        except Infeasible:
            return [*found, None, None][:2]
        found.append(course.step_seconds)
    return found


def find_planned(plans: list[Cell], cell: Cell) -> float | None:
    """Seconds of the planned step."""
    for each in plans:
        if (each["model"], each["hardware"]) == (cell["model"], cell["hardware"]):
            made = each["attempts"].get("auto", {})
            if abs(each["share"] - cell["share"]) < 1e-3 and made.get("fits"):
                return float(made["step_seconds"])
    return None


def summarize(cells: list[Cell], chosen: list[str]) -> list[str]:
    """Print a row a model; what does not hold."""
    wrong, best_on = [], 0
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    print(f"\n{'':13}" + "".join(f"{policy:>12}" for policy in chosen) + f"{'over auto':>12}   cells that all finish")
    for model in models:
        own = [cell for cell in cells if cell["model"] == model]
        whole = [cell for cell in own if all(cell["seconds"][policy][1] for policy in chosen)]
        sums = {policy: sum(cell["seconds"][policy][1] / cell["plain_seconds"] for cell in whole) for policy in chosen}
        over = [cell["seconds"][OWN][1] / cell["planned_seconds"] for cell in own
                if OWN in chosen and cell["seconds"][OWN][1] and cell["planned_seconds"]]  # fmt: skip
        share = {policy: total / max(1, len(whole)) for policy, total in sums.items()}
        median = statistics.median(over) if over else float("nan")
        print(f"{model:13}" + "".join(f"{share[policy]:12.3f}" for policy in chosen) + f"{median:12.3f}   {len(whole)}")
        if OWN in chosen:
            best_on += sums[OWN] <= EQUAL * min(sums.values())
            if not median <= MOST_OVER_PLAN:
                wrong.append(f"{model}: {OWN} takes {median:.3f} times the planned step in the median")
    for policy in chosen:
        finished = sum(cell["seconds"][policy][1] is not None for cell in cells)
        print(f"{policy}: finishes {finished} of {len(cells)}")
    if OWN in chosen and best_on < 0.9 * len(models):
        wrong.append(f"{OWN} is the best on {best_on} of {len(models)} models")
    return wrong


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, ["v100"])
    parser.add_argument("--budgets", default="30%peak:90%peak:7")
    parser.add_argument("--policies", default=",".join(names(policies)))
    parser.add_argument("--plans", type=pathlib.Path, default=pathlib.Path(__file__).parent / "results/planners.json")
    options = parser.parse_args()
    chosen = options.policies.split(",")
    shares = [budget / WHOLE for budget in read_budgets(options.budgets, peak_bytes=WHOLE)]
    plans = json.loads(options.plans.read_text())["results"] if options.plans.exists() else []
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model in options.models:
        for hardware in options.hardware:
            for share in shares:
                key = {"model": model, "hardware": hardware, "share": share}
                cell = next((each for each in results if each.items() >= key.items()), None)
                if cell is None:
                    cell = {**key, "seconds": {}}
                    results.append(cell)
                missing = [policy for policy in chosen if policy not in cell["seconds"]]
                if not missing or not slice_.has(0):
                    continue
                trace, costs = find_job(model, hardware, options.cache)
                plain = pose(trace, costs, 1).plain
                cell["plain_seconds"] = plain.step_seconds
                cell["planned_seconds"] = find_planned(plans, cell)
                for policy in missing:
                    cell["seconds"][policy] = run_policy(
                        trace, costs, int(share * plain.peak_bytes), policy, plain.step_seconds
                    )
                save_results(options.output, results)
    results = [cell for cell in results if all(policy in cell["seconds"] for policy in chosen)]
    wrong = summarize(results, chosen)
    print("\n" + "\n".join(wrong) if wrong else "\nEvery demand holds.")
    if options.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
