"""One contender in a process of its own: `peer_worker.py MODEL CONTENDER PROFILE.json [--small]`.

Prints one line of JSON with what it measured, then one line for each step that it is asked for on its standard input.
All contenders use the same allocator (that of Elbowroom's extension, which keeps its pages) and as many threads, and
the meter is PyTorch's profiler, from before the model is built. It is stopped before steps are timed.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from peer_contenders import change
from peer_models import MODELS
from profiler_meter import ProfilerMeter
from step_time import measure_peak

import elbowroom
from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.workloads import Workload

COMPARED_STEPS = 3
"""Steps after which parameters are compared; the optimizer's state is made in the first, and code is compiled."""
MOST_STEPS = 10


class Contender:
    """A workload as one contender trains it, with what is known of its steps."""

    def __init__(self, workload: Workload, room: Any = None) -> None:
        self.workload, self.room = workload, room
        self.spans: list[tuple[int, int]] = []
        self.losses: list[str] = []

    def step(self) -> None:
        """Do one step."""
        with self.room.step() if self.room is not None else contextlib.nullcontext():
            self.loss = self.workload.step()

    def step_and_note(self) -> None:
        """Do one step, and keep when it was and its loss."""
        begin = time.time_ns()
        self.step()
        self.spans.append((begin, time.time_ns()))
        self.losses.append(digest([self.loss]))

    def is_settled(self) -> bool:
        """Whether steps are as they will be."""
        return self.room is None or str(self.room.journal().steps[-1].mode) in ("planned", "plain")


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bytes of some tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        local = tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()
        # Of a copy: a room never moves again what NumPy has been shown.
        found.update(local.contiguous().clone().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def make(model: str, contender: str, profile: str, is_small: bool) -> Contender:
    """Build a contender; "elbowroom:BYTES" and "elbowroom-inductor:BYTES" train within a budget."""
    workload = MODELS[model].make(is_small)
    family, _, parameter = contender.partition(":")
    if not family.startswith("elbowroom"):
        return Contender(change(workload, MODELS[model], contender))
    if family == "elbowroom-inductor":
        workload.model.compile(backend="inductor")
    room = elbowroom.fit(
        workload.model, workload.optimizer, int(parameter), profile=elbowroom.load(HardwareProfile, profile)
    )
    return Contender(workload, room)


def measure(build: Callable[[], Contender]) -> tuple[Contender, dict[str, Any]]:
    """Train some steps under the meter.

    Returns:
        peak_bytes: of the last step; of a room: of all steps. first_bytes: of all steps. bits: digests of
        losses, parameters and buffers after `COMPARED_STEPS`.
    """
    meter = ProfilerMeter()
    meter.start()
    origin = time.time_ns()
    try:
        contender = build()
        bits = train_some(contender)
    finally:
        meter.stop()
    seconds, live = meter.timeline()
    marks = np.searchsorted(np.array(seconds), (np.array(contender.spans) - origin) * 1e-9)
    peaks = [max(live[max(0, begin - 1) : end + 1]) for begin, end in marks.tolist()]
    found: dict[str, Any] = {"peak_bytes": peaks[-1], "first_bytes": max(peaks), "bits": bits}
    if contender.room is not None:
        records = contender.room.journal().steps
        found |= {
            "peak_bytes": max(peaks),
            "modes": [str(record.mode) for record in records],
            "notes": sorted({record.note for record in records if record.note}),
            "offloaded_bytes": records[-1].offloaded_bytes,
            "recomputed": records[-1].recomputed,
            "stall_seconds": records[-1].stall_seconds,
        }
        planned = contender.room.planned
        if planned is not None:
            found["forecast_seconds"] = planned.forecast.step_seconds
    return contender, found


def train_some(contender: Contender) -> str:
    """Train until steps are as they will be. Returns digests of losses, parameters and buffers after the first."""
    bits = ""
    while len(contender.spans) < MOST_STEPS and not (bits and contender.is_settled()):
        contender.step_and_note()
        if len(contender.spans) == COMPARED_STEPS:
            model = contender.workload.model
            bits = f"{'-'.join(contender.losses)} {digest(model.parameters())} {digest(model.buffers())}"
    if contender.room is not None:
        contender.step_and_note()  # the digest has brought state back, which has left again after this step
    return bits


def find_fewest(model: str, targets: list[int], is_small: bool) -> dict[str, Any]:
    """Return the fewest first blocks to checkpoint for each target (bytes) that checkpoints reach."""
    from peer_contenders import group_blocks, recompute

    workload = MODELS[model].make(is_small)
    groups = group_blocks(workload, MODELS[model], min(MODELS[model].sizes), recompute)
    known: dict[int, int] = {}

    def peak_with(count: int) -> int:
        for index, group in enumerate(groups):
            group.run = recompute if index < count else None
        if count not in known:
            known[count] = measure_peak(workload, workload.step)
        return known[count]

    for _ in range(2):
        workload.step()
    counts = {}
    for target in targets:
        low, high = 0, len(groups)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if peak_with(middle) <= target else (middle + 1, high)
        if peak_with(high) <= target:
            counts[str(target)] = high
    return {"counts": counts, "blocks": len(groups)}


def serve(contender: Contender) -> None:
    """Do one step for each line, and print its seconds and those of all threads on the processor."""
    for _ in sys.stdin:
        gc.collect()
        begin, before = time.perf_counter(), time.process_time()
        contender.step()
        found = {"seconds": time.perf_counter() - begin, "processor_seconds": time.process_time() - before}
        mode = str(contender.room.journal().steps[-1].mode) if contender.room is not None else ""
        say({**found, "mode": mode})
    if contender.room is not None:
        contender.room.detach()


def say(found: dict[str, Any]) -> None:
    """Print one line."""
    print(json.dumps(found), flush=True)


def main() -> None:
    """Run one contender until its standard input ends."""
    model, contender, profile = sys.argv[1:4]
    is_small = "--small" in sys.argv
    # All allocate as those in a room do, and while there is this limit nobody gives back pages.
    CpuLedger().scope.limit_bytes = 1 << 50
    if contender.startswith("fewest:"):
        say(find_fewest(model, json.loads(contender.partition(":")[2]), is_small))
        return
    try:
        running, found = measure(lambda: make(model, contender, profile, is_small))
    except Exception as error:
        traceback.print_exc()
        say({"failed": f"{type(error).__name__}: {error}"[:500]})
        return
    say(found)
    serve(running)


if __name__ == "__main__":
    main()
