"""The planner league: which strategy makes the fastest step, and how far is each from what no plan can beat?

    python benchmarks/planners.py [--models ResNet-50 ...] [--hardware v100 ...] [--budgets 20%peak:100%peak:9]
        [--strategies all] [--cache FOLDER] [--output FILE.json] [--minutes 9] [--again auto,bound] [--check]

Ten models on four cards within nine budgets each, shares of the plain step's forecast peak. All figures are forecasts
of judged plans, but for the planning times, which are measured here. A run goes on from what --output has already
(--again forgets a strategy, or the bounds, first), and --minutes 0 only prints. With --check the exit code is 1 where
a demand does not hold:

- auto is never slower by more than 0.5 % than any other strategy;
- auto's gap to the bound has a median of at most 2 % at budgets of 40 % and more, and 6 % below;
- auto finds a plan wherever any strategy does;
- no plan is above its budget, none beats the bound, and nothing failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import Any

from league import HARDWARE, Slice, add_options, find_batch, find_job, read_results, save_results
from standings import find_violations, print_summary

from elbowroom.cli.lists import read_budgets, read_strategies
from elbowroom.errors import ElbowroomError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.problem import pose

BOUND = "bound"
Cell = dict[str, Any]


def list_cells(options: argparse.Namespace, results: list[Cell]) -> list[Cell]:
    """The cells that were asked for, as far as they are known; adds new ones to the results."""
    known = {(cell["model"], cell["hardware"], cell["share"]): cell for cell in results}
    wanted = []
    for model in options.models:
        for hardware in options.hardware:
            for share in options.shares:
                cell = known.get((model, hardware, share))
                if cell is None:
                    cell = {"model": model, "hardware": hardware, "share": share, "attempts": {}}
                    results.append(cell)
                wanted.append(cell)
    return wanted


def find_facts(trace: Trace, costs: Costs, cell: Cell) -> Cell:
    """What a cell says of its step, apart from any strategy; clears what is known of another step."""
    problem = pose(trace, costs, 1)
    facts = {
        "batch": find_batch(cell["model"], cell["hardware"]),
        "dtype": HARDWARE[cell["hardware"]],
        "ops": len(trace.ops),
        "trace_digest": costs.trace_digest,
        "plain_peak_bytes": problem.plain.peak_bytes,
        "plain_seconds": problem.plain.step_seconds,
        "smallest_bytes": problem.floor.peak_bytes,
        "budget_bytes": int(problem.plain.peak_bytes * cell["share"]),
    }
    if "trace_digest" in cell and any(cell[name] != value for name, value in facts.items()):
        cell["attempts"] = {}
        cell.pop("bound_seconds", None)
    return cell | facts


def add_bound(trace: Trace, costs: Costs, cell: Cell) -> None:
    """The least any plan takes, where there is one at all."""
    begin = time.perf_counter()
    cell["bound_seconds"] = find_bound(pose(trace, costs, cell["budget_bytes"])).seconds
    cell["bound_planning_seconds"] = time.perf_counter() - begin


def make_attempt(trace: Trace, costs: Costs, cell: Cell, strategy: str, is_first: bool) -> dict[str, Any]:
    """What a strategy makes of a cell; a strategy that fails does not end the league.

    `first`: the first plan of this strategy in this process, whose time includes what is compiled or loaded once.
    """
    begin = time.perf_counter()
    try:
        made = attempt(trace, costs, cell["budget_bytes"], strategy)
    except Exception as error:
        what = "refused" if isinstance(error, ElbowroomError) and isinstance(error, ValueError) else "failed"
        return {what: f"{type(error).__name__}: {error}"[:300], "planning_seconds": time.perf_counter() - begin}
    figures = {} if made.outcome is None else dataclasses.asdict(made.outcome)
    return {
        "fits": made.outcome is not None,
        "needed_bytes": made.needed_bytes,
        "planning_seconds": made.planning_seconds,
        "first": is_first,
        **figures,
    }


def run(options: argparse.Namespace, results: list[Cell], cells: list[Cell], strategies: tuple[str, ...]) -> bool:
    """Fill cells until the time is over; whether all are filled."""
    slice_ = Slice(options.minutes)
    longest: dict[str, float] = {}
    for cell in results:
        for strategy, made in cell["attempts"].items():
            longest[strategy] = max(longest.get(strategy, 0.0), made["planning_seconds"])
    warm: set[str] = set()
    saved = time.monotonic()
    for cell in cells:
        missing = [strategy for strategy in strategies if strategy not in cell["attempts"]]
        if not missing and "bound_seconds" in cell:
            continue
        if not slice_.has(0):
            return False
        trace, costs = find_job(cell["model"], cell["hardware"], options.cache)
        cell.update(find_facts(trace, costs, cell))
        missing = [strategy for strategy in strategies if strategy not in cell["attempts"]]
        if cell["budget_bytes"] >= cell["smallest_bytes"] and "bound_seconds" not in cell:
            add_bound(trace, costs, cell)
        cell.setdefault("bound_seconds", None)
        for strategy in missing:
            if not slice_.has(longest.get(strategy, 0.0)):
                return False
            made = make_attempt(trace, costs, cell, strategy, strategy not in warm)
            warm.add(strategy)
            longest[strategy] = max(longest.get(strategy, 0.0), made["planning_seconds"])
            cell["attempts"][strategy] = made
            if "failed" in made:
                print(f"{cell['model']} on {cell['hardware']} at {cell['share']:.1%}: {strategy}: {made['failed']}")
        print(describe(cell), flush=True)
        if time.monotonic() - saved > 20:
            save_results(options.output, results)
            saved = time.monotonic()
    return True


def describe(cell: Cell) -> str:
    """One line on the way."""
    fitting = {name: made["step_seconds"] for name, made in cell["attempts"].items() if made.get("fits")}
    head = f"{cell['model']:13} {cell['hardware']:8} {cell['share']:6.1%}  "
    if not fitting:
        return head + "nothing fits"
    best = min(fitting, key=lambda name: fitting[name])
    plain, bound = cell["plain_seconds"], cell["bound_seconds"]
    gap = f"{fitting[best] / bound - 1:.1%} over the bound" if bound else ""
    return head + f"{best} {fitting[best] / plain:.3f} x plain, {gap}"


def main() -> None:
    """Run, print the standings, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, list(HARDWARE))
    parser.add_argument("--budgets", default="20%peak:100%peak:9")
    parser.add_argument("--strategies", default="all")
    parser.add_argument("--again", default="", help="strategies whose results are made anew; bound for the bounds")
    options = parser.parse_args()
    strategies = read_strategies(options.strategies)
    options.shares = [round(share / 10**6, 6) for share in read_budgets(options.budgets, peak_bytes=10**6)]
    if max(options.shares) > 1:
        parser.error("--budgets: shares of the plain peak, which every model has another of: 20%peak:100%peak:9")
    results = read_results(options.output)
    cells = list_cells(options, results)
    for name in filter(None, options.again.split(",")):
        for cell in cells:
            cell["attempts"].pop(name, None)
            if name == BOUND:
                cell.pop("bound_seconds", None)
    try:
        complete = run(options, results, cells, strategies)
    finally:
        save_results(options.output, [cell for cell in results if cell["attempts"]])
    tried = [cell for cell in cells if cell["attempts"]]
    print_summary(tried, strategies)
    violations = find_violations(tried, strategies)
    if not complete:
        violations.append(f"{len(cells) - len(tried)} of {len(cells)} cells, or strategies in others, were not run")
    print("\n" + "\n".join(violations) if violations else "\nEvery demand holds.")
    if options.check and violations:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
