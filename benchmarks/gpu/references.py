"""A model without Elbowroom: plain, and with what a user would do instead."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

import elbowroom
from benchmarks.gpu.baselines import checkpoint_blocks, offload_activations, offload_optimizer, save_on_host
from benchmarks.gpu.measure import measure_host, measure_peaks, median, release_all, time_steps
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.problem import pose
from elbowroom.workloads import Workload

Make = Callable[[], Workload]
Options = dict[str, Any]
Report = Callable[[dict[str, Any]], None]

NO_LIMIT_BYTES = 1 << 62


def measure(name: str, workload: Workload, step: Callable[[], object], device: torch.device, count: int) -> Options:
    """Return peaks and seconds of some steps."""
    time_steps(step, device, 2)  # the first makes the optimizer's state
    peaks = measure_peaks(step, workload, device)
    seconds = time_steps(step, device, count)
    print(f"  {name}: {median(seconds):.4f} s a step, peak {peaks['allocated'] / 2**20:.0f} MiB", flush=True)
    host = measure_host(step, device, count)
    return {"peak_bytes": peaks, "seconds": median(seconds), "all_seconds": seconds, "host": host}


def run_plain(make: Make, options: Options, report: Report) -> None:
    """Measure the plain step, and find the smallest budget that works."""
    device = torch.device(options["device"])
    profile = elbowroom.load(HardwareProfile, options["profile"])
    try:
        workload = make()
        report({"plain": measure("plain", workload, workload.step, device, options["steps"])})
        with elbowroom.fit(workload.model, workload.optimizer, NO_LIMIT_BYTES, profile=profile) as room:
            while room.planned is None:
                with room.step():
                    workload.step()
            problem = pose(room.planned.trace, room.planned.costs, 1)
    except torch.OutOfMemoryError:
        report({"out_of_memory": True})
        return
    forecast = room.planned.forecast
    report({
        "floor_bytes": problem.floor.peak_bytes,
        "forecast_plain_bytes": forecast.peak_bytes,
        "forecast_plain_seconds": forecast.step_seconds,
        "ops": len(room.planned.trace.ops),
        "saves": len(room.planned.trace.saves),
    })  # fmt: skip


def run_peers(make: Make, options: Options, report: Report) -> None:
    """Measure what a user would do instead; what does not work here is said, and does not stop the others."""
    device = torch.device(options["device"])

    def checkpointed(workload: Workload) -> Callable[[], object]:
        report({"checkpointed_blocks": checkpoint_blocks(workload.model)})
        return workload.step

    def saved_on_host(workload: Workload) -> Callable[[], object]:
        return save_on_host(workload, pin_memory=device.type == "cuda")

    changes: dict[str, Callable[[Workload], Callable[[], object]]] = {
        "checkpoint": checkpointed, "save_on_cpu": saved_on_host, "trl": offload_activations,
        "torchao": offload_optimizer,
    }  # fmt: skip
    for name, change in changes.items():
        release_all(device)
        workload = make()
        try:
            found = measure(name, workload, change(workload), device, max(2, options["steps"] // 2))
        except Exception as error:
            if not isinstance(error, ImportError):
                traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        report({name: found})
        del workload
