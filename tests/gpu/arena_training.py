"""A training on CUDA with the arena or without it, as a program of its own: an allocator is chosen once for a process.

Prints the losses and a digest of the parameters to the last bit, and what was reserved and counted, as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from typing import Any

import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.gpu.test_room_gpu import make

STEPS = 12


def train(name: str, way: str, profile: str, arena: Any) -> dict[str, Any]:
    """Some steps: in a loop of their own, or in a room that offloads all it may."""
    model, optimizer, run_step = make(name)
    room = None
    if way == "room":
        room = elbowroom.fit(
            model, optimizer, 1 << 40, profile=elbowroom.load(HardwareProfile, profile), strategy="offload_all",
        )  # fmt: skip
    losses, peaks = [], []
    for _ in range(STEPS):
        torch.cuda.reset_peak_memory_stats()
        with contextlib.ExitStack() as stack:
            if room is not None:
                stack.enter_context(room.step())
            elif arena is not None:
                stack.enter_context(arena.step())
            losses.append(run_step())
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    torch.cuda.synchronize()
    stamp = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        stamp.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    found = {
        "losses": [loss.double().item().hex() for loss in losses], "parameters": stamp.hexdigest(),
        "allocated_peak_bytes": peaks[-1][0], "reserved_peak_bytes": peaks[-1][1],
    }  # fmt: skip
    if room is not None:
        found["metered_peak_bytes"] = room.journal().steps[-1].peak_bytes
        room.detach()
    if arena is not None:
        counts = arena.count()
        found["counts"] = {field: getattr(counts, field) for field, *_ in counts._fields_}
    return found


def fill(arena: Any) -> dict[str, Any]:
    """More than the device has: an error of PyTorch's own, after which it goes on."""
    total = torch.cuda.mem_get_info()[1]
    kind = ""
    try:
        torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        kind = "OutOfMemoryError"
    small = torch.ones(1000, device="cuda")
    graph = ""
    if arena is not None:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                small + 1
        except RuntimeError as error:
            graph = str(error)
    return {"error": kind, "sum": small.sum().item(), "graph": graph}


def main(name: str, way: str, profile: str, has_arena: str) -> None:
    """Train, or fill the device, and print what came out."""
    arena = elbowroom.use_planned_allocator() if has_arena == "arena" else None
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    print(json.dumps(fill(arena) if way == "fill" else train(name, way, profile, arena)))


if __name__ == "__main__":
    main(*sys.argv[1:])
