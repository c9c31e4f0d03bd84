"""Plans whose ops run in slices: the smallest budgets with and without, and VGG-16 in the memory of a small card.

    python benchmarks/slice_planning.py [--parts floors,vgg,state] [--models ...] [--output FILE.json]

floors  The smallest budget of a step with whole ops, and in slices: exact ones, and ones that add sums in another
        order. Without the model's state, which slices do not change, it is the working set.
vgg     VGG-16 with 256 and 512 images in 4 and in 2 GiB of a Titan X (Maxwell, 12 GiB), over the step on a card with
        enough memory. Beside it the bound of any plan with these slices; vDNN published 18 % for 256 images in the
        12 GB of that card, and tvDNN "a few GB" for both batches, with no figure in its abstract. The optimizer is SGD.
state   The same by `auto`, where the model's state may leave as well.

All figures are forecasts of judged plans.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from typing import Any

from headlines import make_titan_x
from league import capture
from writing import write_results

from elbowroom.cost.price import price
from elbowroom.errors import Infeasible
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.costs import Costs
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.ir.trace import STATE_ROLES, Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import plan, pose
from elbowroom.planner.slicing.choice import Slices
from elbowroom.units import format_bytes

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "VGG-16": ("torchvision:vgg16", {"batch": 64}),
    "VGG-16-BN": ("torchvision:vgg16_bn", {"batch": 64}),
    "ResNet-50": ("torchvision:resnet50", {"batch": 64}),
    "U-Net": ("unet:build", {"batch": 16, "optimizer": "sgd", "image_size": 256}),
    "ViT-B": ("timm:vit_base_patch16_224", {"batch": 64}),
    "GPT-2": ("transformers:gpt2", {"batch": 8, "sequence_length": 1024, "optimizer": "sgd"}),
}

BATCHES = (256, 512)
BUDGETS = (4 << 30, 2 << 30)
STRATEGIES = ("auto", "tvdnn_heuristic", "tvdnn_ilp")


def find_needed(trace: Trace, costs: Costs, slices: Slices) -> int:
    """Return the smallest budget of offloading everything."""
    try:
        plan(trace, costs, 1, strategy="offload_all", slices=slices)
    except Infeasible as error:
        return error.needed_bytes
    raise AssertionError("a budget of one byte was enough")


def measure_floors(models: list[str]) -> list[dict[str, Any]]:
    """Return the smallest budgets of some models."""
    rows = []
    for name in models:
        spec, options = MODELS[name]
        trace = capture(spec, options)
        costs = price(trace, load_shipped("p100"))
        state_bytes = sum(each.nbytes for each in trace.storages if each.role in STATE_ROLES and each.created < 0)
        row: dict[str, Any] = {"model": name, **options, "state_bytes": state_bytes}
        for slices in Slices:
            begin = time.perf_counter()
            row[str(slices)] = find_needed(trace, costs, slices)
            row[f"{slices}_seconds"] = time.perf_counter() - begin
        rows.append(row)
        sizes = "  ".join(f"{slices} {format_bytes(row[str(slices)])}" for slices in Slices)
        working = [row[str(slices)] - state_bytes for slices in Slices]
        ratios = "  ".join(f"{nbytes / working[0]:.2f}" for nbytes in working[1:])
        print(f"{name:10} {sizes}  state {format_bytes(state_bytes)}  working set {ratios} of whole", flush=True)
    return rows


def plan_vgg(manages: Manages, strategies: Sequence[str]) -> list[dict[str, Any]]:
    """Return the forecasts for VGG-16 in a small memory."""
    rows = []
    for batch in BATCHES:
        trace = capture("torchvision:vgg16", {"batch": batch, "optimizer": "sgd"})
        costs = price(trace, make_titan_x())
        for budget_bytes in BUDGETS:
            for slices in (Slices.ANY, Slices.EXACT):
                for strategy in strategies:
                    row = {"batch": batch, "budget_bytes": budget_bytes, "slices": str(slices), "strategy": strategy}
                    row |= judge(trace, costs, budget_bytes, strategy, slices, manages)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    return rows


def judge(
    trace: Trace, costs: Costs, budget_bytes: int, strategy: str, slices: Slices, manages: Manages
) -> dict[str, Any]:
    """Return the figures of one plan."""
    whole = pose(trace, costs, budget_bytes)
    found: dict[str, Any] = {"plain_seconds": whole.plain.step_seconds, "whole_ops_need_bytes": whole.floor.peak_bytes}
    begin = time.perf_counter()
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, slices=slices, manages=manages)
    except Infeasible as error:
        return {**found, "needed_bytes": error.needed_bytes}
    seconds = time.perf_counter() - begin
    sliced, sliced_costs, decided = apply_cuts(trace, costs, made)
    problem = pose(sliced, sliced_costs, budget_bytes, manages=manages)
    forecast, bound = problem.drafter.replay.run(decided), find_bound(problem)
    return found | {
        "over_plain": forecast.step_seconds / whole.plain.step_seconds,
        "bound_over_plain": bound.seconds / whole.plain.step_seconds,
        "over_bound": forecast.step_seconds / bound.seconds,
        "peak_bytes": forecast.peak_bytes,
        "moved_bytes": forecast.offloaded_bytes + forecast.reloaded_bytes,
        "ops_in_slices": len(made.cuts),
        "planning_seconds": seconds,
    }


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default="floors,vgg")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--output", help="JSON file")
    arguments = parser.parse_args()
    parts = {
        "floors": functools.partial(measure_floors, arguments.models),
        "vgg": functools.partial(plan_vgg, Manages.ACTIVATIONS, STRATEGIES),
        "state": functools.partial(plan_vgg, Manages.EVERYTHING, ("auto",)),
    }
    results = [{"part": name, **row} for name in arguments.parts.split(",") for row in parts[name]()]
    write_results(arguments.output, results)


if __name__ == "__main__":
    main()
