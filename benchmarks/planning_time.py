"""How long until a plan? Seconds of capturing a step on fake tensors, and of each strategy's plan.

    python benchmarks/planning_time.py [--rounds 3] [--output FILE.json]

Whole training steps with AdamW, as `elbowroom capture` and `elbowroom plan` take them, at budgets 10 %, 50 % and 90 %
of the way from the smallest one that works to the plain peak. Each figure is the slowest of the rounds.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from writing import write_results

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.planner.problem import list_strategies, pose
from elbowroom.units import format_seconds
from elbowroom.workloads import build

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet-50": ("torchvision:resnet50", {"batch": 16, "image_size": 224}),
    "GPT-2 small": ("transformers:gpt2", {"batch": 4, "sequence_length": 512}),
    "BERT-base": ("transformers:bert", {"batch": 16, "sequence_length": 128}),
}
SHARES = (0.1, 0.5, 0.9)
Value = TypeVar("Value")


def timed(work: Callable[[], Value]) -> tuple[Value, float]:
    """What it returns, and how long it took."""
    gc.collect()
    begin = time.perf_counter()
    value = work()
    return value, time.perf_counter() - begin


def run(name: str, rounds: int, profile: Any) -> dict[str, Any]:
    """One model: capture it, price it, plan it."""
    spec, options = MODELS[name]
    workload = build(spec, optimizer="adamw", seed=0, **options)
    found = [timed(lambda: elbowroom.capture(workload.step, workload.model, workload.optimizer)) for _ in range(rounds)]
    trace = found[0][0]
    costs, price_seconds = timed(lambda: elbowroom.price(trace, profile))
    floor = pose(trace, costs, 1).floor.peak_bytes
    keep_all = elbowroom.plan(trace, costs, 1 << 50, strategy="keep_all")
    peak = elbowroom.simulate(trace, costs, keep_all).peak_bytes
    plans: dict[str, dict[str, float | None]] = {}
    for strategy in list_strategies():
        plans[strategy] = {}
        for share in SHARES:
            budget = floor + int(share * (peak - floor))
            try:
                seconds = [
                    timed(lambda: elbowroom.plan(trace, costs, budget, strategy=strategy))[1]  # noqa: B023
                    for _ in range(rounds)
                ]
                plans[strategy][f"{share:.0%}"] = max(seconds)
            except Infeasible:
                plans[strategy][f"{share:.0%}"] = None
    return {
        "model": name,
        **options,
        "ops": len(trace.ops),
        "saves": len(trace.saves),
        "capture_seconds": max(seconds for _, seconds in found),
        "price_seconds": price_seconds,
        "plan_seconds": plans,
    }


def main() -> None:
    """Run, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output")
    options = parser.parse_args()
    profile = elbowroom.probe("cpu")
    results = []
    for name in MODELS:
        result = run(name, options.rounds, profile)
        results.append(result)
        print(f"{name}: {result['ops']} ops, captured in {format_seconds(result['capture_seconds'])}")
        for strategy, plans in result["plan_seconds"].items():
            cells = ("-" if seconds is None else format_seconds(seconds) for seconds in plans.values())
            print(f"  {strategy:16}" + "".join(f"{cell:>12}" for cell in cells), flush=True)
    write_results(options.output, results)


if __name__ == "__main__":
    main()
