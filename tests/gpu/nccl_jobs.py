"""What a rank trains on a CUDA device with NCCL."""

from __future__ import annotations

import dataclasses

import torch

from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.problem import pose
from elbowroom.room import Room
from tests.rank_jobs import CASES, IMAGES, WORDS, Outcome, train

NO_LIMIT_BYTES = 1 << 62
SHAPES = {WORDS: (512, *WORDS[1:]), IMAGES: (256, *IMAGES[1:])}
"""Batches of the CPU's jobs, and those with which activations outweigh the workspaces of CUDA's libraries."""

SHARES = (0.15, 0.5, 0.85)
"""How far each budget lies on the way from the smallest that works to the plain peak."""


def train_case(rank: int, name: str, profile: HardwareProfile) -> dict[float, Outcome]:
    """Train a job plainly (as share 0) and within budgets; by share."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    case = CASES[name]
    case = dataclasses.replace(case, shape=SHAPES.get(case.shape, (256, *case.shape[1:])))
    ends: list[int] = []

    def note_range(room: Room) -> None:
        assert room.planned is not None
        ends.append(pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes)
        ends.append(room.planned.forecast.peak_bytes)

    found = {0.0: train(rank, case, None, profile)}
    train(rank, case, NO_LIMIT_BYTES, profile, inspect=note_range)
    floor, top = ends
    for share in SHARES:
        budget = int(floor + share * (top - floor))
        found[share] = train(rank, case, budget, profile, strategy="auto:effort=0.1")
    return found
