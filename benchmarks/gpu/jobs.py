"""One process of the check: `jobs.py NAME OPTIONS.json RESULT.json`. Writes its result as it grows, and prints a line a
step of the way. Exits with 0 if it came to its end, whatever it found.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]

MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"spec": "torchvision:resnet50", "batch": 64, "image_size": 224},
    "vgg16": {"spec": "torchvision:vgg16", "batch": 64, "image_size": 224},
    "vit_b_16": {"spec": "torchvision:vit_b_16", "batch": 64, "image_size": 224},
    "gpt2": {"spec": "transformers:gpt2", "batch": 8, "sequence_length": 1024},
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {"spec": "torchvision:resnet18", "batch": 16, "image_size": 96},
    "vgg16": {"spec": "torchvision:squeezenet1_1", "batch": 8, "image_size": 96},
    "vit_b_16": {"spec": "timm:vit_tiny_patch16_224", "batch": 2},
    "gpt2": {"spec": "transformers:gpt2", "batch": 2, "sequence_length": 64, "layers": 1},
}

MARGIN_BYTES, MARGIN_SHARE = 256 << 20, 0.10
"""What a process may reserve beyond its budget, for what the caching allocator cannot use: free pieces between blocks,
and pages of 2 MiB. The context of CUDA is outside of what the cap counts."""

NO_LIMIT_BYTES = 1 << 62
SETTLING_STEPS = 8

Report = Callable[[dict[str, Any]], None]


# Part 1: tests --------------------------------------------------------------------------------------------------------


def run_tests(options: dict[str, Any], report: Report) -> None:
    """The tests under tests/gpu."""
    if importlib.util.find_spec("pytest") is None:
        report({"passed": 0, "failed": [], "skipped": 0, "error": "pytest is not installed: no test was run"})
        return
    import pytest

    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0}

    class Count:
        def pytest_runtest_logreport(self, report: Any) -> None:
            if report.failed:
                found["failed"].append(f"{report.nodeid} ({report.when})")
                print(f"\n{report.nodeid}\n{report.longreprtext[-4000:]}", flush=True)  # before time runs out
            elif report.skipped:
                found["skipped"] += 1
            elif report.when == "call":
                found["passed"] += 1
            say(found)

    say = report
    arguments = [str(ROOT / "tests" / "gpu"), "-q", "-p", "no:cacheprovider", "--tb=short", "--durations=9", "-rN",
                 "-p", "benchmarks.gpu.own_tests"]  # fmt: skip
    if importlib.util.find_spec("xdist") is not None:
        arguments += ["--numprocesses=7", "--dist=worksteal"]
    if importlib.util.find_spec("hypothesis") is None:
        print("hypothesis is not installed: tests/conftest.py and its check for leaks are left out", flush=True)
        arguments.append("--noconftest")
    code = int(pytest.main(arguments, plugins=[Count()]))
    if code not in (0, 1, 5):
        found["error"] = f"pytest ended with {code}"
    report(found)


# Part 2: probe --------------------------------------------------------------------------------------------------------


def run_probe(options: dict[str, Any], report: Report) -> None:
    """Rates and links of this machine, saved as a profile."""
    import elbowroom
    from elbowroom.ir.files import to_json

    def tell(what: str, share: float) -> None:
        print(f"  {share:4.0%} {what}", flush=True)

    begin = time.perf_counter()
    profile = elbowroom.probe(options["device"], progress=tell)
    elbowroom.save(profile, options["profile"])
    report({"profile": to_json(profile), "seconds": time.perf_counter() - begin})


# Part 4: models within budgets ----------------------------------------------------------------------------------------


def run_references(options: dict[str, Any], report: Report) -> None:
    """A model without Elbowroom."""
    from benchmarks.gpu.references import run_peers, run_plain

    workload_of = functools.partial(build_model, options)
    run = run_peers if options.get("peers") else run_plain
    report({"batch": find_options(options)["batch"]})
    run(workload_of, options, report)


def run_budget(options: dict[str, Any], report: Report) -> None:
    """A model within one budget, under a cap on what the process may reserve."""
    import torch

    import elbowroom
    from elbowroom.errors import Infeasible
    from elbowroom.ir.hardware import HardwareProfile

    device = torch.device(options["device"])
    budget = options["budget_bytes"]
    profile = elbowroom.load(HardwareProfile, options["profile"])
    found: dict[str, Any] = {"budget_bytes": budget, "cap_bytes": cap_memory(device, budget)}
    report(found)
    workload = build_model(options)
    try:
        _measure_room(workload, budget, profile, device, options["steps"], found)
    except Infeasible as error:
        found["infeasible"] = str(error)
        # The smallest budget was found in another process, whose workspaces may have been a little smaller.
        if not budget < error.needed_bytes <= 1.02 * budget:
            raise
        found["budget_bytes"] = error.needed_bytes
        _measure_room(workload, error.needed_bytes, profile, device, options["steps"], found)
    report(found)


def cap_memory(device: Any, budget_bytes: int) -> int:
    """Let this process reserve so much on the device and no more. Returns how much; 0 for no cap."""
    import torch

    if device.type != "cuda":
        return 0
    cap = int(budget_bytes * (1 + MARGIN_SHARE)) + MARGIN_BYTES
    whole = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, cap / whole), device.index or 0)
    return cap


def _measure_room(workload: Any, budget: int, profile: Any, device: Any, steps: int, found: dict[str, Any]) -> None:
    from measure import count_outside, measure_calls, measure_host, measure_peaks, median, time_steps

    import elbowroom
    from elbowroom.ir.journal import Mode

    room = elbowroom.fit(workload.model, workload.optimizer, budget, profile=profile)

    def step() -> None:
        with room.step():
            workload.step()

    try:
        begin = time.perf_counter()
        for _ in range(SETTLING_STEPS):
            step()
            if room.journal().steps[-1].mode in (Mode.PLANNED, Mode.PLAIN):
                break
        found["settling_seconds"] = time.perf_counter() - begin
        captured = [record for record in room.journal().steps if record.mode is Mode.CAPTURE]
        found["capture_peak_bytes"] = max((record.peak_bytes or 0 for record in captured), default=0)
        time_steps(step, device, 1)
        found["peak_bytes"] = measure_peaks(step, workload, device, 1 if device.type == "cpu" else 2)
        seconds = time_steps(step, device, steps)
        found |= {"seconds": median(seconds), "all_seconds": seconds, "host": measure_host(step, device, steps)}
        before = len(room.journal().steps)
        found["calls"] = measure_calls(step, 2)
        found |= _watch_transfers(room, step, profile, device)
        last = room.journal().steps[-1]
        found |= {
            "modes": [str(record.mode) for record in room.journal().steps],
            "notes": sorted({record.note for record in room.journal().steps if record.note}),
            "offloaded_bytes": last.offloaded_bytes,
            "reloaded_bytes": last.reloaded_bytes,
            "recomputed": last.recomputed,
            "host_stall_seconds": median([record.stall_seconds for record in room.journal().steps[3:before]]),
        }
        planned = room.planned
        if planned is not None:
            forecast = dataclasses.asdict(planned.forecast)
            del forecast["live_bytes"], forecast["begin_seconds"]
            found["forecast"] = forecast
            found["overhead_seconds"] = planned.costs.overhead_seconds
            found["decisions"] = len(planned.plan.decisions)
            found["outside_bytes"] = count_outside(planned.trace, device, profile.alignment_bytes)
    finally:
        room.detach()


def _watch_transfers(room: Any, step: Callable[[], object], profile: Any, device: Any) -> dict[str, float]:
    """Seconds of copies in a step, the part that computing waited for, and the share that did not show."""
    from measure import TransferClock, time_steps

    count = 2
    if device.type == "cuda":
        clock = TransferClock(room)
        try:
            time_steps(step, device, count)
        finally:
            copying, waiting = (seconds / count for seconds in clock.stop())
    else:
        # The thread's own times are not to be had: what the link needs for the bytes stands in for them.
        time_steps(step, device, 1)
        last, link = room.journal().steps[-1], profile.links[0]
        copying = last.offloaded_bytes / link.out_bytes_per_second + last.reloaded_bytes / link.back_bytes_per_second
        waiting = last.stall_seconds
    overlap = max(0.0, 1.0 - waiting / copying) if copying else 1.0
    return {"transfer_seconds": copying, "exposed_seconds": waiting, "overlap": overlap}


def find_options(options: dict[str, Any]) -> dict[str, Any]:
    """How a model is built."""
    chosen = dict((TINY_MODELS if options["tiny"] else MODELS)[options["model"]])
    if options.get("batch"):
        chosen["batch"] = options["batch"]
    return chosen


def build_model(options: dict[str, Any]) -> Any:
    """The workload of a job, the same each time."""
    from elbowroom.workloads import build

    chosen = find_options(options)
    return build(chosen.pop("spec"), optimizer="adamw", seed=0, device=options["device"], **chosen)


def describe_machine(device: str) -> dict[str, Any]:
    """What ran this."""
    import platform

    import psutil
    import torch

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "device": "cpu",
    }
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {
            "device": about.name,
            "device_bytes": about.total_memory,
            "capability": f"{about.major}.{about.minor}",
            "cudnn": torch.backends.cudnn.version(),
            "tf32": {"matmul": torch.backends.cuda.matmul.allow_tf32, "cudnn": torch.backends.cudnn.allow_tf32},
        }
    return found


def run_machine(options: dict[str, Any], report: Report) -> None:
    """Whether there is a device at all, and which."""
    report(describe_machine(options["device"]))


def run_build(options: dict[str, Any], report: Report) -> None:
    """The C++ extension, compiled."""
    from elbowroom.native.library import NATIVE, build_library

    begin = time.perf_counter()
    build_library(NATIVE)
    report({"extension_seconds": time.perf_counter() - begin})


def run_features(options: dict[str, Any], report: Report) -> None:
    """One feature, on one model."""
    from benchmarks.gpu.features import run_feature

    run_feature(options, report)


def run_overhead(options: dict[str, Any], report: Report) -> None:
    """What a room costs where the program sets the pace."""
    from benchmarks.gpu.overhead import run_overhead

    run_overhead(options, report)


def run_bits(options: dict[str, Any], report: Report) -> None:
    """Small whole models, compared to the last bit."""
    import bits

    bits.compare_all(options, report)


JOBS = {
    "machine": run_machine,
    "build": run_build,
    "feature": run_features,
    "overhead": run_overhead,
    "tests": run_tests,
    "probe": run_probe,
    "bits": run_bits,
    "reference": run_references,
    "peers": run_references,
    "budget": run_budget,
}


def main() -> None:
    """Run one job."""
    name, options, result = sys.argv[1], json.loads(sys.argv[2]), pathlib.Path(sys.argv[3])
    latest: dict[str, Any] = {}

    def report(found: dict[str, Any]) -> None:
        latest.update(found)
        # Whole or not at all: the process may be killed at any moment.
        draft = result.with_suffix(".draft")
        draft.write_text(json.dumps(latest))
        draft.replace(result)

    try:
        JOBS[name](options, report)
    except Exception as error:
        traceback.print_exc()
        report({"error": f"{type(error).__name__}: {str(error)[:2000]}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
