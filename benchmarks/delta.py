"""DELTA's headlines: 40 to 70 % less memory, and a batch 2.04 (ResNet-50) and 2.25 (ResNet-101) times PyTorch's.

    python benchmarks/delta.py [--models ResNet-50 ...] [--real] [--no-batch delta,...] [--cache FOLDER] [--minutes 9]
        [--output FILE.json] [--check]

memory   the step of one batch within 60, 50, 40 and 30 % of its plain peak: over the plain step, by policy. Beside it
         the planned step of `auto`, which shows what knowing the step is worth.
batch    the largest batch within the memory of the card, over the largest without us (to 2 %), and how many times the
         plain seconds a sample takes in it.

In simulation on a V100 with 16 GB, images of 224 pixels; with --real in real runs on this machine, images of 64 pixels,
within 60 and 30 % of the plain peak, and what the plain step of a smaller batch takes. With so small images parameters,
gradients and momenta weigh more, so that the batch of the former is a large one. Policies: `predictive`, `delta`
and, as the authors' code does it, `delta_code`. Of each the second step counts, which knows the first; of real ones the
fastest after the first, of twice as many where a plan has to settle. Losses of real runs must be those of the plain
run, bit for bit, and measured peaks within the budget. A run goes on from what --output has already. With --check the
exit code is 1 where one of these does not hold for `predictive`: it finishes at all budgets, its largest batch is the
published multiple, real losses and peaks are as they must be.

Inferred: neither the authors' card nor their batches are known. The fixed batch is one that takes twice the card.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

from headlines import Jobs
from league import DEFAULT_CACHE, MODELS, Slice, read_results, save_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.planner.comparison.strategies_compared import attempt
from elbowroom.planner.problem import pose
from elbowroom.residency.access_history import AccessHistory
from elbowroom.simulator.online import simulate_policy
from elbowroom.units import format_bytes

PUBLISHED = {"ResNet-50": 2.04, "ResNet-101": 2.25}
"""Batch over that of PyTorch."""

SHARES = (0.6, 0.5, 0.4, 0.3)
REAL_SHARES = {"predictive": (0.6, 0.3), "delta_code": (0.6,), "auto": (0.6,)}
"""Of real runs, by policy: they take long."""

POLICIES = ("predictive", "delta", "delta_code")
OWN, TOLERANCE, PATIENCE, STEPS = "predictive", 0.02, 30.0, 3
PIXELS, BATCH, SMALL_BATCH = 64, 384, 16
"""Of real runs; the small batch's plain peak is what the largest batch has to fit into."""

Row = dict[str, Any]


# -- in simulation ----------------------------------------------------------------------------------------------------


def simulate(jobs: Jobs, model: str, batch: int, budget_bytes: int, policy: str) -> float | None:
    """Seconds of the second step over those of the plain one; None where there is none."""
    trace, costs = jobs.load(model, batch)
    plain = pose(trace, costs, 1).plain.step_seconds
    if policy == "auto":
        outcome = attempt(trace, costs, budget_bytes, "auto").outcome
        return None if outcome is None else outcome.step_seconds / plain
    history, seconds = AccessHistory(), 0.0
    for _ in range(2):
        try:
            course = simulate_policy(
                trace, costs, budget_bytes, policy=policy, history=history, most_seconds=PATIENCE * plain
            )
        except Infeasible:
            return None
        seconds = course.step_seconds
    return seconds / plain


def find_largest(fits: Callable[[int], bool], low: int) -> int:
    """The largest batch that fits, to `TOLERANCE`; `low` does."""
    high = 2 * low
    while fits(high):
        low, high = high, 2 * high
    while high - low > max(1, TOLERANCE * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def simulate_memory(jobs: Jobs, model: str, policy: str, share: float) -> Row:
    """One batch within a share of its plain peak."""
    batch = MODELS[model][2][0]
    plain_bytes = jobs.peaks(model, batch)[0]
    found = simulate(jobs, model, batch, int(share * plain_bytes), policy)
    return {"batch": batch, "plain_peak_bytes": plain_bytes, "over_plain": found, "holds": found is not None}


def simulate_batch(jobs: Jobs, model: str, policy: str, plain_batch: int) -> Row:
    """The largest batch within the card."""
    found = find_largest(lambda batch: simulate(jobs, model, batch, jobs.memory_bytes, policy) is not None, plain_batch)
    over = simulate(jobs, model, found, jobs.memory_bytes, policy)
    ratio = found / plain_batch
    return {
        "plain_batch": plain_batch, "batch": found, "ratio": ratio, "over_plain": over,
        "holds": ratio >= PUBLISHED[model],
    }  # fmt: skip


def find_plain_batch(jobs: Jobs, model: str) -> int:
    """The largest batch that fits into the card without us, exactly."""
    low, high = 32, MODELS[model][2][0]
    while high - low > 1:
        few, many = jobs.peaks(model, low)[0], jobs.peaks(model, high)[0]
        guess = low + int((jobs.memory_bytes - few) * (high - low) / (many - few))  # peaks are nearly linear
        middle = min(max(guess, low + 1), high - 1)
        if jobs.peaks(model, middle)[0] > jobs.memory_bytes:
            high = middle
        elif jobs.peaks(model, middle + 1)[0] > jobs.memory_bytes:
            return middle
        else:
            low = middle + 1
    return low


# -- in real runs -----------------------------------------------------------------------------------------------------


def train(model: str, batch: int, budget_bytes: int | None, policy: str, steps: int = STEPS) -> Row:
    """Some steps: losses, seconds of the fastest after the first, and most bytes at once; without a budget, plain.

    Raises:
        Infeasible: a step does not fit.
    """
    from step_time import measure_peak

    from elbowroom.workloads import build

    gc.collect()
    workload = build(MODELS[model][0], batch=batch, image_size=PIXELS, optimizer="sgd", seed=0)
    losses: list[float] = []
    seconds: list[float] = []
    peaks: list[int] = []

    def step() -> None:
        begin = time.perf_counter()
        losses.append(float(workload.step()))
        seconds.append(time.perf_counter() - begin)

    if budget_bytes is None:
        peaks = [measure_peak(workload, step) for _ in range(steps)]
    else:
        # Of planned steps the first are watched op by op, and after them the step is planned again.
        planned = {"step": workload.step, "settling_steps": 1}
        options = planned if policy == "auto" else {"mode": "dynamic", "policy": policy}
        steps *= 2 if policy == "auto" else 1
        room = elbowroom.fit(workload.model, workload.optimizer, budget_bytes, **options)
        try:
            for _ in range(steps):
                with room.step():
                    step()
            peaks = [record.peak_bytes or 0 for record in room.journal().steps]
        finally:
            room.detach()
    return {"losses": losses, "seconds": min(seconds[1:]), "peak_bytes": max(peaks)}


def run_memory(plain: Row, model: str, policy: str, share: float) -> Row:
    """One batch within a share of its plain peak."""
    budget_bytes = int(share * plain["peak_bytes"])
    row = {"batch": BATCH, "plain_peak_bytes": plain["peak_bytes"], "over_plain": None, "holds": False}
    try:
        found = train(model, BATCH, budget_bytes, policy)
    except Infeasible as error:
        return {**row, "needed_bytes": error.needed_bytes}
    is_same = found["losses"][: len(plain["losses"])] == plain["losses"]
    holds = is_same and found["peak_bytes"] <= budget_bytes
    over = found["seconds"] / plain["seconds"]
    return {**row, "over_plain": over, "peak_bytes": found["peak_bytes"], "is_same": is_same, "holds": holds}


def run_batch(model: str, policy: str) -> Row:
    """The largest batch within the plain peak of the small one."""
    small = train(model, SMALL_BATCH, None, policy)
    budget_bytes = small["peak_bytes"]

    def fits(batch: int) -> bool:
        try:
            return bool(train(model, batch, budget_bytes, policy, steps=2)["peak_bytes"] <= budget_bytes)
        except Infeasible:
            return False

    batch = find_largest(fits, SMALL_BATCH)
    found, plain = train(model, batch, budget_bytes, policy), train(model, batch, None, policy)
    ratio, is_same = batch / SMALL_BATCH, found["losses"] == plain["losses"]
    return {
        "plain_batch": SMALL_BATCH, "batch": batch, "ratio": ratio, "budget_bytes": budget_bytes,
        "over_plain": found["seconds"] / plain["seconds"], "is_same": is_same,
        "holds": is_same and ratio >= PUBLISHED[model],
    }  # fmt: skip


# -- both -------------------------------------------------------------------------------------------------------------


def run_all(options: argparse.Namespace, results: list[Row]) -> None:
    """Add to the results what they lack."""
    slice_ = Slice(options.minutes)
    jobs = Jobs(options.cache, load_shipped("v100"))
    where = "real" if options.real else "simulated"
    if options.real:
        # The plain steps allocate as those in a room do, and while there is this limit nobody gives back their pages.
        CpuLedger().scope.limit_bytes = 1 << 50
    for model in options.models:
        plain: Any = None
        for policy, share in itertools.product((*POLICIES, "auto"), (*SHARES, None)):
            key = {"headline": "batch" if share is None else "memory", "where": where, "model": model,
                   "policy": policy, "share": share}  # fmt: skip
            if any(key.items() <= row.items() for row in results) or not slice_.has(0):
                continue
            if options.real and share is not None and share not in REAL_SHARES.get(policy, ()):
                continue
            if policy in (options.no_batch if share is None else "").split(","):
                continue
            if options.real and share is not None:
                plain = plain or train(model, BATCH, None, policy)
                row = run_memory(plain, model, policy, share)
            elif options.real:
                row = run_batch(model, policy)
            elif share is not None:
                row = simulate_memory(jobs, model, policy, share)
            else:
                plain = plain or find_plain_batch(jobs, model)
                row = simulate_batch(jobs, model, policy, plain)
            results.append({**key, **row})
            print(describe(results[-1]), flush=True)
            save_results(options.output, results)


def describe(row: Row) -> str:
    """One line."""
    over = "does not finish" if row["over_plain"] is None else f"{row['over_plain']:.3f} times the plain step"
    head = f"{row['where']:10}{row['model']:11}{row['policy']:11}"
    if row["headline"] == "memory":
        size = format_bytes(row["plain_peak_bytes"])
        return f"{head}{row['share']:4.0%} of {size:>9}: {over}" + (
            "" if row.get("is_same", True) else ", NOT THE SAME"
        )
    return f"{head}batch {row['batch']}, {row['ratio']:.2f} times {row['plain_batch']}: {over}"


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--real", action="store_true", help="real runs on this machine; else in simulation")
    parser.add_argument("--no-batch", default="", metavar="POLICIES", help="whose largest batch is not looked for")
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long; 0 runs nothing")
    parser.add_argument("--output", help="results, added to what the file has already")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a demand does not hold")
    options = parser.parse_args()
    results = read_results(options.output)
    run_all(options, results)
    print()
    for row in results:
        print(describe(row))
    wrong = [describe(row) for row in results if row["policy"] == OWN and not row["holds"]]
    print("\n" + "\n".join(("Does not hold:", *wrong)) if wrong else "\nEvery demand holds.")
    if options.check and wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
