"""Replicas with gradient buckets from before their rooms: what every rank counts, and what a meter sees."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.native.outside_meter import register_meter

WIDTH = 256

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "new": (0, {}),
    "after two steps": (2, {}),
    "after three steps": (3, {}),
    "all may be unused": (1, {"find_unused_parameters": True}),
    "static graph": (3, {"static_graph": True}),
    "buckets hold the gradients": (3, {"gradient_as_bucket_view": True}),
}
"""Plain steps before the room, and options of the replicas."""


def find_gaps(rank: int, profile: HardwareProfile) -> dict[str, list[int]]:
    """Return for each case the bytes by which the count before each step, and each step's peak, is off."""
    meter = register_meter()
    return {name: _find_gaps(rank, *case, meter, profile) for name, case in CASES.items()}


def _find_gaps(rank: int, steps: int, options: dict[str, Any], meter: Any, profile: HardwareProfile) -> list[int]:
    gc.collect()
    before = meter.reset_peak()
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(index: int) -> None:
        optimizer.zero_grad()
        x = torch.randn(1536, WIDTH, generator=torch.Generator().manual_seed(10 * index + rank))
        model(x).square().mean().backward()
        optimizer.step()

    for index in range(steps):
        step(index)
    gaps = []
    with elbowroom.fit(model, optimizer, 10 << 20, profile=profile, min_offload_bytes=1024) as room:
        for index in range(4):
            gaps.append(_find_gap(room, meter) + before)
            with room.step():
                step(index)
            gaps.append((room.journal().steps[-1].peak_bytes or 0) - (meter.read_peak() - before))
    return gaps


def _find_gap(room: elbowroom.Room, meter: Any) -> int:
    """Return the room's count less the meter's. A thread of gloo's may free a message between the two: read again."""
    while True:
        counted = room._ledger.live_bytes
        gap = counted - meter.reset_peak()
        if room._ledger.live_bytes == counted:
            return gap
