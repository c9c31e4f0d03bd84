"""State and activations planned together: against the best split of the budget, and beside TENSILE's figures.

    python benchmarks/state_planning.py split [--models ResNet-50 ...] [--hardware rtx4090] [--shares 0.6 0.4]
    python benchmarks/state_planning.py tensile [--hardware rtx2080ti]
    python benchmarks/state_planning.py optimizer [--hardware rtx4090 h200]
        [--batch 16] [--effort 1.0] [--cache FOLDER] [--output FILE.json] [--again] [--minutes 9] [--check]

`split`: a split gives the state that is on the device a constant part of the budget, and the activations the rest; each
part is planned as well as `auto` can, and the best of nine splits counts. Moves of the state are chosen by the same
scheduler. With --check the exit code is 1 unless the joint plan is ahead on at least eight tenths of the models: faster
in each cell, or as fast where neither is slower than plain by more than 0.2 %.

`tensile`: forecast overhead at the savings that TENSILE reports (K. Zhang et al., 2021, and the authors' repository:
the savings that the final scripts use, and savings with overheads of a development version), Adam, batch 16. Their card
has 11 GB; peaks there include the CUDA context, which forecasts do not. The steps of their logs are slower than the
card, so each model is planned at two speeds: that of the card, and that of the logs, where all op times are longer by
one factor. With --check the exit code is 1 if, at the speed of the logs, a saving is not reached, or reached with more
overhead than TENSILE's where that is known.

`optimizer`: only the optimizer's state is away: the budget is the plain peak less its bytes. Beside the overhead stand
the seconds of the step's compute, and of the transfer: the optimizer's state out and back. Each model has two batches:
16 (transformers 4), and that of the league for the card. With --check the exit code is 1 if the overhead is 5 % or more
where the compute takes longer than the transfer, unless the bound says that no plan does better than 5 %.

Models are trained with AdamW in float32, one fused op a parameter: as TENSILE's framework does, and as a step in groups
does. A run goes on from what --output has already; --again makes the joint plans anew, and keeps those of splits.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import sys
import time
from typing import Any

import numpy as np
from league import DEFAULT_CACHE, MODELS, Slice, find_batch, read_results, save_results
from tensile_logs import LOGGED_SECONDS, slow_down

import elbowroom
from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.options import Manages, find_strategy
from elbowroom.planner.problem import MIN_OFFLOAD_BYTES, pose
from elbowroom.planner.state.scheduler import StateScheduler
from elbowroom.planner.state.search import list_state_reads

SPLITS = 9
"""Parts of the budget for the state, at equal distances from none to all state."""

SAVINGS = {
    "VGG-16": (0.4654, 0.3565, 0.0961),
    "Inception-v3": (0.6162, 0.6304, 0.1720),
    "Inception-v4": (0.7081, 0.6894, 0.2927),
    "ResNet-50": (0.6000, 0.7067, 0.3916),
    "DenseNet-121": (0.7222, 0.7604, 0.1843),
}
"""TENSILE's final saving; and saving and overhead of one development run."""

NEGLIGIBLE = 1.002

MOST_OVERHEAD = 0.05
"""Of a step whose compute takes longer than the transfer of the optimizer's state."""

SMALL_BATCHES = {"BERT-large": 4, "GPT-2 medium": 4}
"""In place of --batch, for long sequences."""


def find_job(model: str, hardware: str, batch: int, cache: pathlib.Path) -> tuple[Trace, Costs]:
    """The step of a model with AdamW, and what it costs on a card."""
    spec, options, _ = MODELS[model]
    path = cache / f"{model.replace(' ', '-')}-{batch}-adamw-fused.json.gz"
    if path.exists():
        trace = elbowroom.load(Trace, path)
    else:
        print(f"capturing {model}, {batch} samples", file=sys.stderr, flush=True)
        trace = capture_in_groups(spec, {**options, "batch": batch, "device": "cpu"})
        cache.mkdir(parents=True, exist_ok=True)
        elbowroom.save(trace, path)
    return trace, elbowroom.price(trace, load_shipped(hardware))


def capture_in_groups(spec: str, options: dict[str, Any]) -> Trace:
    """Capture one step on fake tensors, with one group of parameters and one fused op for each parameter."""
    from elbowroom.workloads import build

    workload = build(spec, **{**options, "optimizer": "adamw"})
    whole = workload.optimizer.param_groups
    groups = [{**group, "params": [each], "fused": True} for group in whole for each in group["params"]]
    workload.optimizer.param_groups = groups
    return elbowroom.capture(workload.step, workload.model, workload.optimizer, name=spec)


def plan_jointly(trace: Trace, costs: Costs, budget_bytes: int, effort: float) -> float | None:
    """Seconds of the joint plan; None if none fits."""
    try:
        made = elbowroom.plan(trace, costs, budget_bytes, strategy=f"auto:effort={effort}", manages="everything")
    except Infeasible:
        return None
    return elbowroom.simulate(trace, costs, made).step_seconds


def plan_split(trace: Trace, costs: Costs, budget_bytes: int, effort: float) -> float | None:
    """Seconds of the best split; None if none fits."""
    problem = pose(trace, costs, budget_bytes)
    scheduler = StateScheduler(problem.drafter.replay, problem.drafter.min_bytes)
    bare = [dataclasses.replace(home, nbytes=0) if home.id in trace.state else home for home in trace.storages]
    activations = dataclasses.replace(trace, storages=tuple(bare))
    held = np.array(problem.plain.live_bytes) - np.array(pose(activations, costs, budget_bytes).plain.live_bytes)
    found: list[float] = []
    for share in np.linspace(0.0, 1.0, SPLITS):
        kept_bytes = int(share * held.max())
        inner = pose(activations, costs, max(budget_bytes - kept_bytes, 0))
        if inner.floor.peak_bytes > inner.budget_bytes:
            continue
        made = find_strategy(f"auto:effort={effort}")(inner)
        state = scheduler.schedule(held - kept_bytes, list_state_reads(trace, made))
        whole = dataclasses.replace(made, state=state, budget_bytes=budget_bytes)
        elbowroom.check(trace, whole)
        forecast = elbowroom.simulate(trace, costs, whole)
        if forecast.peak_bytes <= budget_bytes:
            found.append(forecast.step_seconds)
    return min(found, default=None)


def compare_with_splits(options: argparse.Namespace) -> bool:
    """Run `split`, print, and tell whether the joint plan is ahead on enough models."""
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model, hardware, share in itertools.product(options.models, options.hardware, options.shares):
        batch = SMALL_BATCHES.get(model, options.batch)
        key = {"part": "split", "model": model, "hardware": hardware, "batch": batch, "share": share}
        cell = find_cell(results, key)
        if not slice_.has(0) or (not options.again and all(name in cell for name in NAMES)):
            continue
        trace, costs = find_job(model, hardware, batch, options.cache)
        plain = pose(trace, costs, 1).plain
        budget_bytes = int(share * plain.peak_bytes)
        if "split_seconds" not in cell:
            cell["split_seconds"] = plan_split(trace, costs, budget_bytes, options.effort)
        begin = time.perf_counter()
        cell["joint_seconds"] = plan_jointly(trace, costs, budget_bytes, options.effort)
        cell |= {"planning_seconds": time.perf_counter() - begin, "plain_seconds": plain.step_seconds}
        cell["effort"] = options.effort
        save_results(options.output, results)
        print(describe_split(cell), flush=True)
    cells = [cell for cell in results if cell["part"] == "split" and all(name in cell for name in NAMES)]
    ahead: dict[str, bool] = {}
    for cell in cells:
        ahead[cell["model"]] = ahead.get(cell["model"], True) and wins_over_split(cell)
        print(describe_split(cell))
    print(f"the joint plan is ahead in {sum(map(wins_over_split, cells))} of {len(cells)} cells, and in all cells of "
          f"{sum(ahead.values())} of {len(ahead)} models")  # fmt: skip
    return sum(ahead.values()) >= 0.8 * len(ahead)


def find_cell(results: list[dict[str, Any]], key: dict[str, Any]) -> dict[str, Any]:
    """Return the result with this key; add it if there is none."""
    cell = next((each for each in results if each.items() >= key.items()), None)
    if cell is None:
        cell = dict(key)
        results.append(cell)
    return cell


def describe_split(cell: dict[str, Any]) -> str:
    """Return one line of `split`."""
    shown = [f"{cell[name] / cell['plain_seconds']:.4f}" if cell[name] else "no plan" for name in NAMES]
    mark = "" if wins_over_split(cell) else "   BEHIND"
    return f"{cell['model']:14} {cell['share']:.0%} of the plain peak: joint {shown[0]}, best split {shown[1]}{mark}"


NAMES = ("joint_seconds", "split_seconds")


def wins_over_split(cell: dict[str, Any]) -> bool:
    """Whether the joint plan is faster, or neither is noticeably slower than plain."""
    joint, split = (np.inf if cell[name] is None else cell[name] for name in NAMES)
    return bool(joint < split or joint == split == np.inf or max(joint, split) <= NEGLIGIBLE * cell["plain_seconds"])


def compare_with_tensile(options: argparse.Namespace) -> bool:
    """Run `tensile`, print, and tell whether each saving is reached with no more overhead."""
    results, slice_ = read_results(options.output), Slice(options.minutes)
    models = [model for model in options.models if model in SAVINGS]
    for speed, model, hardware in itertools.product(("card", "logs"), models, options.hardware):
        key = {"part": "tensile", "speed": speed, "model": model, "hardware": hardware, "batch": options.batch}
        cell = find_cell(results, key)
        if not slice_.has(0) or (not options.again and "overheads" in cell):
            continue
        trace, costs = find_job(model, hardware, options.batch, options.cache)
        if speed == "logs":
            costs = slow_down(costs, LOGGED_SECONDS[model] / pose(trace, costs, 1).plain.step_seconds)
        problem = pose(trace, costs, 1, manages=Manages.EVERYTHING)
        plain = problem.plain
        begin = time.perf_counter()
        overheads = []
        bounds = []
        for saving in SAVINGS[model][:2]:
            budget_bytes = int((1 - saving) * plain.peak_bytes)
            seconds = plan_jointly(trace, costs, budget_bytes, options.effort)
            overheads.append(None if seconds is None else seconds / plain.step_seconds - 1)
            bounds.append(find_bound(dataclasses.replace(problem, budget_bytes=budget_bytes)).seconds)
        cell["largest_saving"] = 1 - problem.floor.peak_bytes / plain.peak_bytes
        cell |= {"overheads": overheads, "bounds": [each / plain.step_seconds - 1 for each in bounds]}
        cell["planning_seconds"] = time.perf_counter() - begin
        save_results(options.output, results)
    holds = True
    for cell in (cell for cell in results if cell["part"] == "tensile" and "overheads" in cell):
        final, development, theirs = SAVINGS[cell["model"]]
        shown = ["no plan" if each is None else f"{each:.3f}" for each in cell["overheads"]]
        bound = [f"{each:.3f}" for each in cell["bounds"]]
        print(
            f"{cell['model']:14} speed of the {cell['speed']:4} saving {final:.3f}: overhead {shown[0]} (bound "
            f"{bound[0]}); saving {development:.3f}: {shown[1]} (bound {bound[1]}), TENSILE {theirs:.3f}; largest "
            f"saving {cell['largest_saving']:.3f}"
        )
        ours = cell["overheads"]
        if cell["speed"] == "logs":
            holds &= ours[0] is not None and ours[1] is not None and ours[1] <= theirs
    return holds


def move_optimizer_state(options: argparse.Namespace) -> bool:
    """Run `optimizer`, print, and tell whether the overhead is small wherever the link has enough time."""
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model, hardware in itertools.product(options.models, options.hardware):
        for batch in (SMALL_BATCHES.get(model, options.batch), find_batch(model, hardware)):
            cell = find_cell(results, {"part": "optimizer", "model": model, "hardware": hardware, "batch": batch})
            if not slice_.has(0) or (not options.again and "overhead" in cell):
                continue
            trace, costs = find_job(model, hardware, batch, options.cache)
            cell |= measure_optimizer(trace, costs, options.effort)
            save_results(options.output, results)
            print(describe_optimizer(cell), flush=True)
    cells = [cell for cell in results if cell["part"] == "optimizer" and "overhead" in cell]
    for cell in cells:
        print(describe_optimizer(cell))
    return not any(is_missed(cell) for cell in cells)


def measure_optimizer(trace: Trace, costs: Costs, effort: float) -> dict[str, float | None]:
    """Return the figures of one cell of `optimizer`."""
    plain = pose(trace, costs, 1).plain
    sizes = [home.nbytes for home in trace.storages if home.role is Role.OPTIMIZER_STATE]
    moved = [size for size in sizes if size >= MIN_OFFLOAD_BYTES]
    out, back = (sum(copy(costs.link, size) for size in moved) for copy in (offload_seconds, reload_seconds))
    begin = time.perf_counter()
    budget_bytes = plain.peak_bytes - sum(sizes)
    seconds = plan_jointly(trace, costs, budget_bytes, effort)
    planning_seconds = time.perf_counter() - begin
    bound = find_bound(pose(trace, costs, budget_bytes, manages=Manages.EVERYTHING)).seconds
    return {
        "bound": bound / plain.step_seconds - 1,
        "plain_seconds": plain.step_seconds,
        "compute_seconds": sum(costs.op_seconds),
        "transfer_seconds": out + back if costs.link.half_duplex else max(out, back),
        "optimizer_bytes": sum(sizes),
        "plain_peak_bytes": plain.peak_bytes,
        "overhead": np.inf if seconds is None else seconds / plain.step_seconds - 1,
        "planning_seconds": planning_seconds,
    }


def has_time(cell: dict[str, Any]) -> bool:
    """Return True if a step's compute takes longer than the transfer of the optimizer's state."""
    return bool(cell["compute_seconds"] > cell["transfer_seconds"])


def is_missed(cell: dict[str, Any]) -> bool:
    """Return True if the link has enough time, and a better plan may exist."""
    return has_time(cell) and cell["overhead"] >= MOST_OVERHEAD > cell["bound"]


def describe_optimizer(cell: dict[str, Any]) -> str:
    """Return one line of `optimizer`."""
    mark = "" if has_time(cell) else "   less compute than transfer"
    if has_time(cell) and cell["overhead"] >= MOST_OVERHEAD:
        mark = "   MISSED" if is_missed(cell) else "   no plan can do better than the bound"
    away = cell["optimizer_bytes"] / cell["plain_peak_bytes"]
    return (
        f"{cell['model']:13} {cell['hardware']:8} batch {cell['batch']:4}: compute {cell['compute_seconds']:.4f} s, "
        f"transfer {cell['transfer_seconds']:.4f} s, {away:.1%} of the peak away, overhead {cell['overhead']:.4f} "
        f"(bound {cell['bound']:.4f}){mark}"
    )


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--hardware", nargs="+", metavar="PROFILE")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; 0 runs nothing")
    parser.add_argument("--output", help="results, added to what the file has already")
    parser.add_argument("--again", action="store_true", help="make the joint plans anew")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a demand does not hold")
    options = parser.parse_args()
    run, hardware = PARTS[options.part]
    options.hardware = options.hardware or hardware
    holds = run(options)
    sys.exit(options.check and not holds)


PARTS = {
    "split": (compare_with_splits, ["rtx4090"]),
    "tensile": (compare_with_tensile, ["rtx2080ti"]),
    "optimizer": (move_optimizer_state, ["rtx4090", "h200"]),
}
"""How each part is run, and its usual cards."""


if __name__ == "__main__":
    main()
