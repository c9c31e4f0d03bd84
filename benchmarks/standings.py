"""From the results of planners to tables, and to what does not hold of what is demanded."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

Cell = dict[str, Any]

AUTO = "auto"
MOST_EXCESS = 0.005
MOST_GAP, MOST_GAP_BELOW, DEEP = 0.02, 0.06, 0.4
"""Of auto's median gap to the bound: at budgets of `DEEP` and more of the plain peak, and below."""

ROUNDING = 1e-9


def find_seconds(cell: Cell, strategy: str) -> float | None:
    """A strategy's step within a cell; None where it has none."""
    made = cell["attempts"].get(strategy, {})
    return made["step_seconds"] if made.get("fits") else None


def find_fastest(cell: Cell, strategies: Iterable[str]) -> tuple[float, str] | None:
    """The shortest step and whose it is; of equals auto's, then the first by name."""
    found = [
        (seconds, strategy != AUTO, strategy)
        for strategy in strategies
        if (seconds := find_seconds(cell, strategy)) is not None
    ]
    if not found:
        return None
    least = min(found)[0]
    seconds, _, strategy = min((each for each in found if each[0] <= least * (1 + ROUNDING)), key=lambda each: each[1:])
    return seconds, strategy


def find_gap(cell: Cell, strategy: str) -> float | None:
    """How far over the bound; None where there is no plan or no bound."""
    seconds, bound = find_seconds(cell, strategy), cell.get("bound_seconds")
    return None if seconds is None or not bound else seconds / bound - 1


def list_gaps(cells: list[Cell], strategy: str, *, deep: bool | None = None) -> list[float]:
    """Its gaps: of all cells, of those with budgets below `DEEP`, or of the others."""
    chosen = (cell for cell in cells if deep is None or (cell["share"] < DEEP) == deep)
    return [gap for cell in chosen if (gap := find_gap(cell, strategy)) is not None]


def list_excesses(cells: list[Cell], strategies: tuple[str, ...]) -> list[tuple[float, Cell, str]]:
    """How much slower auto is than the best other strategy, cell by cell, worst first; negative where it is faster."""
    found = []
    others = [strategy for strategy in strategies if strategy != AUTO]
    for cell in cells:
        seconds, best = find_seconds(cell, AUTO), find_fastest(cell, others)
        if seconds is not None and best is not None:
            found.append((seconds / best[0] - 1, cell, best[1]))
    return sorted(found, key=lambda each: -each[0])


def name_of(cell: Cell) -> str:
    """A cell, for people."""
    return f"{cell['model']} on {cell['hardware']} at {cell['share']:.0%}"


def find_violations(cells: list[Cell], strategies: tuple[str, ...]) -> list[str]:
    """What does not hold."""
    found = [
        f"{name_of(cell)}: auto is {excess:.2%} slower than {other}"
        for excess, cell, other in list_excesses(cells, strategies)
        if excess > MOST_EXCESS
    ]
    for deep, most in ((False, MOST_GAP), (True, MOST_GAP_BELOW)):
        gaps = list_gaps(cells, AUTO, deep=deep)
        if gaps and statistics.median(gaps) > most:
            where = f"below {DEEP:.0%}" if deep else f"at {DEEP:.0%} and more"
            found.append(f"auto's median gap {where} is {statistics.median(gaps):.2%}, above {most:.0%}")
    for cell in cells:
        best = find_fastest(cell, strategies)
        if AUTO in strategies and best is not None and find_seconds(cell, AUTO) is None:
            found.append(f"{name_of(cell)}: auto finds no plan, {best[1]} does")
        for strategy in strategies:
            made, gap = cell["attempts"].get(strategy, {}), find_gap(cell, strategy)
            if "failed" in made:
                found.append(f"{name_of(cell)}: {strategy} failed: {made['failed']}")
            if made.get("fits") and made["peak_bytes"] > cell["budget_bytes"]:
                found.append(f"{name_of(cell)}: {strategy} is above the budget")
            if gap is not None and gap < -ROUNDING:
                found.append(f"{name_of(cell)}: {strategy} beats the bound by {-gap:.2e}, so that is none")
    return found


def find_reversals(plans: list[dict[str, Any]]) -> list[str]:
    """Budgets, in order, that do worse than a smaller one, or take less than it does."""
    found = []
    fastest: dict[str, Any] | None = None
    highest: dict[str, Any] | None = None
    for plan in plans:
        budget = f"{plan['budget_bytes']} bytes"
        if plan["step_seconds"] is None:
            if fastest is not None:
                found.append(f"{budget}: no plan, though there is one within {fastest['budget_bytes']}")
            continue
        if fastest is not None and plan["step_seconds"] > fastest["step_seconds"] * (1 + ROUNDING):
            slower = plan["step_seconds"] / fastest["step_seconds"] - 1
            found.append(f"{budget}: {slower:.3%} slower than within {fastest['budget_bytes']}")
        else:
            fastest = plan
        if highest is not None and plan["peak_bytes"] < highest["peak_bytes"]:
            less = highest["peak_bytes"] - plan["peak_bytes"]
            found.append(f"{budget}: a peak {less} bytes below that within {highest['budget_bytes']}")
        else:
            highest = plan
    return found


def print_summary(cells: list[Cell], strategies: tuple[str, ...]) -> None:
    """The tables: the fastest of each cell, the strategies, and auto against what is demanded."""
    shares = sorted({cell["share"] for cell in cells})
    for hardware in dict.fromkeys(cell["hardware"] for cell in cells):
        print(f"\n{hardware}: the fastest strategy, and how far over the bound")
        print(f"{'':13}" + "".join(f"{share:>20.0%}" for share in shares))
        for model in dict.fromkeys(cell["model"] for cell in cells):
            row = {cell["share"]: cell for cell in cells if (cell["hardware"], cell["model"]) == (hardware, model)}
            print(f"{model:13}" + "".join(f"{_say_fastest(row.get(share), strategies):>20}" for share in shares))
    _print_strategies(cells, strategies)
    excesses = list_excesses(cells, strategies)
    if excesses:
        excess, cell, other = excesses[0]
        slower = sum(each > MOST_EXCESS for each, _, _ in excesses)
        print(f"\nauto's largest excess over the best other: {excess:.2%}, over {other}, {name_of(cell)}")
        print(f"cells where auto is slower by more than {MOST_EXCESS:.1%}: {slower} of {len(excesses)}")
    for deep, where in ((False, f"{DEEP:.0%} and more"), (True, f"below {DEEP:.0%}")):
        gaps = list_gaps(cells, AUTO, deep=deep)
        if gaps:
            print(
                f"auto's gap at {where}: median {statistics.median(gaps):.2%}, most {max(gaps):.2%} ({len(gaps)} cells)"
            )


def _say_fastest(cell: Cell | None, strategies: tuple[str, ...]) -> str:
    if cell is None:
        return ""
    best = find_fastest(cell, strategies)
    if best is None:
        return "none"
    gap = find_gap(cell, best[1])
    return f"{best[1][:13]} {'' if gap is None else f'{gap:.1%}'}"


def _print_strategies(cells: list[Cell], strategies: tuple[str, ...]) -> None:
    """One row a strategy. Planning times are those of all cells, but for the first plan of each process."""
    heads = ("fits", "fastest", "median x plain", "median gap", "planning: median", "most")
    print(f"\n{'':32}" + "".join(f"{head:>17}" for head in heads) + "   (planning in seconds)")
    for strategy in strategies:
        tried = [cell for cell in cells if strategy in cell["attempts"]]
        made = [cell["attempts"][strategy] for cell in tried]
        slowdowns = [seconds / cell["plain_seconds"] for cell in tried if (seconds := find_seconds(cell, strategy))]
        gaps = list_gaps(tried, strategy)
        times = [each["planning_seconds"] for each in made if not each.get("first")]
        fastest = 0
        for cell in tried:
            best, own = find_fastest(cell, strategies), find_seconds(cell, strategy)
            fastest += own is not None and best is not None and own <= best[0] * (1 + ROUNDING)
        cells_of = (
            f"{len(slowdowns)} of {len(tried)}",
            str(fastest),
            f"{statistics.median(slowdowns):.3f}" if slowdowns else "-",
            f"{statistics.median(gaps):.1%}" if gaps else "-",
            f"{statistics.median(times):.2f}" if times else "-",
            f"{max(times):.2f}" if times else "-",
        )
        refused = sum("refused" in each for each in made)
        note = f"   refused {refused}" if refused else ""
        print(f"{strategy[:31]:32}" + "".join(f"{text:>17}" for text in cells_of) + note)
