"""One job on a shared device, as a process: trains a model of `tests.models`, and prints what came out as JSON.

    python tests/shared_job.py NAME BUDGET STEPS [PROFILE]

BUDGET is "shared", or an amount; PROFILE a file of `elbowroom probe`. The last line has the losses as hexadecimal
numbers, a digest of the parameters, and (begin, end, peak bytes, budget bytes) of each step.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.models import BATCHES, MODELS


def hash_parameters(model: torch.nn.Module) -> str:
    """Return a digest of the bytes of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_plain(name: str, steps: int) -> dict[str, object]:
    """Train in this process, without a room. Return losses and digest."""
    model, _, step = MODELS[name]().make()
    losses = [float(step(index % BATCHES)).hex() for index in range(steps)]
    return {"losses": losses, "digest": hash_parameters(model)}


def count_most_bytes(jobs: Sequence[Sequence[Sequence[float]]]) -> int:
    """Return the most bytes that jobs held at a time.

    Args:
        jobs: of each job the (begin, end, peak bytes, budget bytes) of each step. Between two steps a job counts with
            its last peak.
    """
    events = []
    for spans in jobs:
        peaks = [span[2] for span in spans]
        for place, span in enumerate(spans):
            before = peaks[place - 1] if place else 0
            events.append((span[0], max(0, peaks[place] - before)))
            events.append((span[0], -max(0, before - peaks[place])))
        events.append((spans[-1][1], -peaks[-1]))
    held = most = 0.0
    for _, change in sorted(events):
        held += change
        most = max(most, held)
    return int(most)


def main(name: str, budget: str, steps: int, profile: str = "") -> None:
    """Train, and print."""
    torch.set_num_threads(1)
    case = MODELS[name]()
    model, optimizer, step = case.make()
    known = elbowroom.load(HardwareProfile, profile) if profile else None
    room = elbowroom.fit(model, optimizer, budget, strategy="tensile", op_time_store=False, profile=known)
    losses, spans = [], []
    for index in range(steps):
        with room.step():
            begin = time.monotonic()
            losses.append(float(step(index % BATCHES)).hex())
        figures = room.metrics()
        spans.append([begin, time.monotonic(), figures.get("peak_bytes", 0), room.budget_bytes])
        print(json.dumps({"step": index}), flush=True)
    room.move_state_out()  # reading it below brings it back
    found = {"losses": losses, "digest": hash_parameters(model), "spans": spans}
    room.detach()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
