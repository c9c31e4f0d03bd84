"""What a room costs where the program, and not the device, sets the pace: small batches, steps in pairs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

import elbowroom
from benchmarks.gpu.measure import measure_calls, measure_host, time_steps
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.problem import pose
from elbowroom.room import Room
from elbowroom.workloads import Workload, build

Report = Callable[[dict[str, Any]], None]

NO_LIMIT_BYTES = 1 << 62
SETTLING_STEPS = 8
PAIRS, STEPS = 9, 4
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (
        {"spec": "transformers:gpt2", "batch": 1, "sequence_length": 128},
        {"spec": "transformers:gpt2", "batch": 1, "sequence_length": 16, "layers": 1},
    ),
    "resnet50": (
        {"spec": "torchvision:resnet50", "batch": 4, "image_size": 224},
        {"spec": "torchvision:resnet18", "batch": 2, "image_size": 32},
    ),
}
"""Each whole, and small to try this script."""


def run_overhead(options: dict[str, Any], report: Report) -> None:
    """Report the seconds of a step and their ratio to plain ones, where everything fits and halfway to the floor."""
    device = torch.device(options["device"])
    profile = elbowroom.load(HardwareProfile, options["profile"])

    def make(name: str) -> Workload:
        return build(**MODELS[name][options["tiny"]], optimizer="adamw", seed=0, device=options["device"])

    for name in MODELS:
        plain, managed = make(name), make(name)
        budget = NO_LIMIT_BYTES
        for label in ("all fits", "half"):
            with elbowroom.fit(managed.model, managed.optimizer, budget, profile=profile) as room:

                def step(room: Room = room, managed: Workload = managed) -> None:
                    with room.step():
                        managed.step()

                for _ in range(SETTLING_STEPS):
                    step()
                    if room.journal().steps[-1].mode in (Mode.PLANNED, Mode.PLAIN):
                        break
                found = _compare(plain.step, step, device)
                found["host"] = {
                    "plain": measure_host(plain.step, device, STEPS),
                    "ours": measure_host(step, device, STEPS),
                }
                found["calls"] = measure_calls(step, STEPS)
                last = room.journal().steps[-1]
                found |= {"mode": str(last.mode), "offloaded_bytes": last.offloaded_bytes, "note": last.note}
                report({f"{name}, {label}": found})
                print(f"  {name}, {label}: {found['ratio']:.3f} x plain, {found['plain_seconds']:.4f} s", flush=True)
                if room.planned is None:
                    break
                floor = pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes
                budget = (floor + room.planned.forecast.peak_bytes) // 2


def _compare(plain: Callable[[], object], ours: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return medians of the seconds of steps, and the median of the ratios of pairs, after a first pair."""
    pairs = []
    for index in range(PAIRS + 1):
        order = (plain, ours) if index % 2 else (ours, plain)
        taken = {step: statistics.median(time_steps(step, device, STEPS)) for step in order}
        pairs.append((taken[plain], taken[ours]))
    pairs = pairs[1:]
    return {
        "plain_seconds": statistics.median(one for one, _ in pairs),
        "seconds": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(other / one for one, other in pairs),
    }
