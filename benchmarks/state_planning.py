"""State and activations planned together: against the best split of the budget, and beside TENSILE's figures.

    python benchmarks/state_planning.py split [--models ResNet-50 ...] [--hardware rtx4090] [--shares 0.6 0.4]
    python benchmarks/state_planning.py tensile [--hardware rtx2080ti]
        [--batch 16] [--effort 1.0] [--cache FOLDER] [--output FILE.json] [--minutes 9] [--check]

`split`: a split gives the state that is on the device a constant part of the budget, and the activations the rest; each
part is planned as well as `auto` can, and the best of nine splits counts. Moves of the state are chosen by the same
scheduler. With --check the exit code is 1 unless the joint plan is faster on at least eight tenths of the models, or as
fast where neither is slower than plain by more than 0.2 %.

`tensile`: forecast overhead at the savings that TENSILE reports (K. Zhang et al., 2021, and the authors' repository:
the savings that the final scripts use, and savings with overheads of a development version), Adam, batch 16. Their card
has 11 GB; peaks there include the CUDA context, which forecasts do not. With --check the exit code is 1 if a saving is
not reached, or reached with more overhead than TENSILE's where that is known.

Models are trained with AdamW, one fused op a parameter: as TENSILE's framework does, and as a step in groups does. A
run goes on from what --output has already.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
from league import DEFAULT_CACHE, MODELS, Slice, read_results, save_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.options import Manages, find_strategy
from elbowroom.planner.problem import pose
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
    """One step on fake tensors, with one group of parameters a fused op."""
    import torch

    from elbowroom.workloads import build

    workload = build(spec, **options)
    groups = [{"params": [each]} for each in workload.model.parameters()]
    optimizer = torch.optim.AdamW(groups, fused=True)

    def step() -> torch.Tensor:
        loss = workload.forward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return elbowroom.capture(step, workload.model, optimizer, name=spec)


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
    """Run `split`, print, and tell whether the joint plan wins often enough."""
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model in options.models:
        for share in options.shares:
            key = {"part": "split", "model": model, "hardware": options.hardware, "share": share}
            if any(cell.items() >= key.items() for cell in results) or not slice_.has(0):
                continue
            trace, costs = find_job(model, options.hardware, options.batch, options.cache)
            plain = pose(trace, costs, 1).plain
            budget_bytes = int(share * plain.peak_bytes)
            joint = plan_jointly(trace, costs, budget_bytes, options.effort)
            split = plan_split(trace, costs, budget_bytes, options.effort)
            seconds = {"plain_seconds": plain.step_seconds, "joint_seconds": joint, "split_seconds": split}
            results.append({**key, **seconds})
            save_results(options.output, results)
    cells = [cell for cell in results if cell["part"] == "split"]
    wins = [wins_over_split(cell) for cell in cells if any(cell[name] for name in NAMES)]
    for cell in cells:
        shown = [f"{cell[name] / cell['plain_seconds']:.3f}" if cell[name] else "no plan" for name in NAMES]
        print(f"{cell['model']:14} {cell['share']:.0%} of the plain peak: joint {shown[0]}, best split {shown[1]}")
    print(f"the joint plan is ahead, or both are as fast as plain, in {sum(wins)} of {len(wins)}")
    return sum(wins) >= 0.8 * len(wins)


NAMES = ("joint_seconds", "split_seconds")


def wins_over_split(cell: dict[str, Any]) -> bool:
    """Whether the joint plan is faster, or neither is noticeably slower than plain."""
    joint, split = (np.inf if cell[name] is None else cell[name] for name in NAMES)
    return bool(joint < split or max(joint, split) <= NEGLIGIBLE * cell["plain_seconds"])


def compare_with_tensile(options: argparse.Namespace) -> bool:
    """Run `tensile`, print, and tell whether each saving is reached with no more overhead."""
    results, slice_ = read_results(options.output), Slice(options.minutes)
    for model in (model for model in options.models if model in SAVINGS):
        key = {"part": "tensile", "model": model, "hardware": options.hardware, "batch": options.batch}
        if any(cell.items() >= key.items() for cell in results) or not slice_.has(0):
            continue
        trace, costs = find_job(model, options.hardware, options.batch, options.cache)
        problem = pose(trace, costs, 1, manages=Manages.EVERYTHING)
        plain = problem.plain
        overheads = []
        for saving in SAVINGS[model][:2]:
            seconds = plan_jointly(trace, costs, int((1 - saving) * plain.peak_bytes), options.effort)
            overheads.append(None if seconds is None else seconds / plain.step_seconds - 1)
        least = 1 - problem.floor.peak_bytes / plain.peak_bytes
        results.append({**key, "overheads": overheads, "largest_saving": least})
        save_results(options.output, results)
    holds = True
    for cell in (cell for cell in results if cell["part"] == "tensile"):
        final, development, theirs = SAVINGS[cell["model"]]
        shown = ["no plan" if each is None else f"{each:.3f}" for each in cell["overheads"]]
        print(f"{cell['model']:14} saving {final:.3f}: overhead {shown[0]}; saving {development:.3f}: {shown[1]}, "
              f"TENSILE {theirs:.3f}; largest saving {cell['largest_saving']:.3f}")  # fmt: skip
        ours = cell["overheads"]
        holds &= ours[0] is not None and ours[1] is not None and ours[1] <= theirs
    return holds


def main() -> None:
    """Run, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("split", "tensile"))
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--hardware", default=None, metavar="PROFILE")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.6, 0.4])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--cache", type=pathlib.Path, default=DEFAULT_CACHE, help="where captured traces are kept")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; 0 runs nothing")
    parser.add_argument("--output", help="results, added to what the file has already")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a demand does not hold")
    options = parser.parse_args()
    options.hardware = options.hardware or {"split": "rtx4090", "tensile": "rtx2080ti"}[options.part]
    holds = compare_with_splits(options) if options.part == "split" else compare_with_tensile(options)
    sys.exit(options.check and not holds)


if __name__ == "__main__":
    main()
