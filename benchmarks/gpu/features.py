"""What a room does beyond activations of whole ops, one feature a process: bits are those without a room.

`state`: parameters, gradients and optimizer state leave; `slices`: an op that has no room runs in slices; `compiled`:
a model compiled by torch.compile; `addresses`: the planned allocator. Jobs under `memory_budget="shared"` are left out,
since they need a broker and a second process.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import elbowroom
from benchmarks.gpu.bits import find_differences, make_repeatable
from benchmarks.gpu.measure import read_peaks, release_all, time_steps
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.problem import pose
from elbowroom.workloads import Workload, build

Report = Callable[[dict[str, Any]], None]
Options = dict[str, Any]

STEPS = 6
NO_LIMIT_BYTES = 1 << 62
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "state": (
        {"spec": "torchvision:vit_b_16", "batch": 8},
        {"spec": "torchvision:resnet18", "batch": 2, "image_size": 64},
    ),
    "slices": (
        {"spec": "torchvision:vgg16", "batch": 32, "optimizer": "sgd"},
        {"spec": "torchvision:vgg11", "batch": 4, "image_size": 64, "optimizer": "sgd"},
    ),
    "compiled": (
        {"spec": "timm:vit_small_patch16_224", "batch": 32},
        {"spec": "torchvision:squeezenet1_1", "batch": 8, "image_size": 64},
    ),
    "addresses": (
        {"spec": "torchvision:resnet50", "batch": 32},
        {"spec": "torchvision:resnet18", "batch": 4, "image_size": 64},
    ),
}
"""Each whole, and small to try this script."""


class Feature:
    """Trains one model plainly, then within budgets, and compares."""

    def __init__(self, options: Options) -> None:
        self.device = torch.device(options["device"])
        self.profile = elbowroom.load(HardwareProfile, options["profile"])
        self.spec = dict(MODELS[options["name"]][options["tiny"]])
        self.backend = options.get("backend", "")

    def make(self) -> Workload:
        """Build the model, the same each time."""
        gc.collect()
        release_all(self.device)
        if self.backend:
            torch._dynamo.reset()
        workload = build(**{"optimizer": "adamw", **self.spec}, seed=0, device=str(self.device))
        if self.backend:
            workload.model.compile(backend=self.backend)
        return workload

    def train(self, workload: Workload, room: Any = None) -> dict[str, Any]:
        """Train some steps, in a room if there is one. Returns losses, parameters and buffers, on the CPU, and seconds.

        Detaches the room, which brings everything back.
        """
        losses = []

        def step() -> None:
            if room is None:
                losses.append(workload.step())
                return
            with room.step():
                losses.append(workload.step())

        seconds = time_steps(step, self.device, STEPS)
        if room is not None:
            room.detach()
        model = workload.model
        tensors = {"losses": losses, "parameters": [*model.parameters()], "buffers": [*model.buffers()]}
        copied = {kind: [each.detach().cpu().clone() for each in found] for kind, found in tensors.items()}
        return {**copied, "seconds": seconds[-1]}

    def train_plain(self, report: Report) -> dict[str, Any]:
        """Train without a room, twice, and report whether plain PyTorch repeats itself."""
        try:
            make_repeatable(strict=True)
            plain = self.train(self.make())
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            make_repeatable(strict=False)  # an op has no deterministic form: perhaps it repeats itself all the same
            plain = self.train(self.make())
        report({"plain_differences": find_differences(plain, self.train(self.make()))})
        return plain

    def compare(self, budget_bytes: int, plain: dict[str, Any], **config: Any) -> dict[str, Any]:
        """Train within a budget, and compare with plain."""
        workload = self.make()
        room = elbowroom.fit(workload.model, workload.optimizer, budget_bytes, profile=self.profile, **config)
        ours = self.train(workload, room)
        records = room.journal().steps
        return {
            "budget_bytes": budget_bytes,
            "peak_bytes": max(record.peak_bytes or 0 for record in records),
            "modes": [str(record.mode) for record in records],
            "peaks_bytes": [record.peak_bytes for record in records],
            "notes": sorted({record.note for record in records if record.note}),
            "offloaded_bytes": records[-1].offloaded_bytes,
            "recomputed": records[-1].recomputed,
            "seconds": ours["seconds"],
            "plain_seconds": plain["seconds"],
            "differences": find_differences(plain, ours),
            "sliced_ops": room.metrics().get("sliced_ops", 0),
        }

    def find_need(self) -> tuple[int, int]:
        """Return the smallest budget that works with whole ops, and the peak of the step without a plan."""
        workload = self.make()
        with elbowroom.fit(workload.model, workload.optimizer, NO_LIMIT_BYTES, profile=self.profile) as room:
            while room.planned is None:
                with room.step():
                    workload.step()
            return pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes, room.planned.forecast.peak_bytes


def try_state(feature: Feature, report: Report) -> None:
    """Train within 0.6 of the bytes of parameters and optimizer state."""
    plain = feature.train_plain(report)
    state_bytes = 3 * sum(each.nbytes for each in plain["parameters"])
    report({"state_bytes": state_bytes, **feature.compare(int(0.6 * state_bytes), plain)})


def try_slices(feature: Feature, report: Report) -> None:
    """Train within 0.7 of what whole ops need; if no exact cut is found on this device, with sums in any order."""
    plain = feature.train_plain(report)
    workload = feature.make()
    need = elbowroom.smallest_budget(workload.model, workload.optimizer, workload.step, profile=feature.profile)
    del workload
    report({"whole_bytes": need})
    try:
        report({"exact": True, **feature.compare(int(0.7 * need), plain)})
    except Infeasible as error:
        report({"infeasible": str(error)[:500]})
        found = feature.compare(int(0.7 * need), plain, exact=False)
        report({"exact": False, **found, "differences": [], "inexact_differences": len(found["differences"])})


def try_compiled(feature: Feature, report: Report) -> None:
    """Train a compiled model halfway between the smallest budget and the plain peak."""
    plain = feature.train_plain(report)
    floor, top = feature.find_need()
    report(feature.compare((floor + top) // 2, plain))


def try_addresses(feature: Feature, report: Report) -> None:
    """Train with the planned allocator, without a room and within a budget."""
    if feature.device.type != "cuda":
        report({"skipped": "the planned allocator is for CUDA"})
        return
    plain = feature.train_plain(report)
    floor, top = feature.find_need()
    torch.cuda.reset_peak_memory_stats(feature.device)
    found = feature.compare((floor + top) // 2, plain)
    report({**found, "allocator": read_peaks(feature.device)})


FEATURES: dict[str, Callable[[Feature, Report], None]] = {
    "state": try_state,
    "slices": try_slices,
    "compiled": try_compiled,
    "addresses": try_addresses,
}


def run_feature(options: Options, report: Report) -> None:
    """Run one feature.

    Raises:
        UsageError: the planned allocator cannot be used.
    """
    if options["name"] == "addresses" and options["device"] == "cuda":
        elbowroom.use_planned_allocator()  # before anything is on the device
    FEATURES[options["name"]](Feature(options), report)
