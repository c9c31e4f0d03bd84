"""One job on a shared device, as a process: trains a model of `tests.models`, and prints what came out as JSON.

    python tests/shared_job.py NAME BUDGET STEPS [PROFILE [warm | evaluate]]

BUDGET is "shared", or an amount; PROFILE a file of `elbowroom probe`. With "warm" it first trains another copy of the
model, so that code is loaded and compiled, says so, and waits for a line. With "evaluate" it evaluates for some time
after half of its steps. The last line has the losses as hexadecimal
numbers, a digest of the parameters, (peak bytes, budget bytes) of each step, and (time, bytes held from then on): the
peak of each step from its beginning, and what is left after it or once state has been moved out.
"""

from __future__ import annotations

import gc
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.job_front import find_step_front
from elbowroom.native import library
from tests.models import BATCHES, MODELS

LEAST = "40MiB"
"""For the model and its first steps."""

EVALUATION_SECONDS = 10.0


def hash_parameters(model: torch.nn.Module) -> str:
    """Return a digest of the bytes of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train_plain(name: str, steps: int) -> dict[str, object]:
    """Train in this process, without a room, on one thread as `main` does. Return losses and digest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model, _, step = MODELS[name]().make()
        losses = [float(step(index % BATCHES)).hex() for index in range(steps)]
        return {"losses": losses, "digest": hash_parameters(model)}
    finally:
        torch.set_num_threads(threads)


def count_most_bytes(jobs: Sequence[Sequence[Sequence[float]]]) -> int:
    """Return the most bytes that jobs held at a time.

    Args:
        jobs: of each job (time, bytes held from then on).
    """
    events = sorted((time, number, nbytes) for number, levels in enumerate(jobs) for time, nbytes in levels)
    held = [0.0] * len(jobs)
    most = 0.0
    for _, number, nbytes in events:
        held[number] = nbytes
        most = max(most, sum(held))
    return int(most)


def warm_up(name: str, known: HardwareProfile | None) -> None:
    """Train another copy of the model within little memory, and let go of it."""
    model, optimizer, step = MODELS[name]().make()
    room = elbowroom.fit(model, optimizer, "44MiB", strategy="tensile", op_time_store=False, profile=known)
    for index in range(4):
        with room.step():
            step(index % BATCHES)
    assert room.planned is not None
    find_step_front(room.planned, room.config)
    room.detach()
    del model, optimizer, step, room
    gc.collect()
    library.load().trim_pages(everywhere=True)


@torch.no_grad()
def evaluate(model: torch.nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Call a model without gradients, again and again."""
    args, kwargs = inputs
    begin = time.monotonic()
    model.eval()
    while time.monotonic() < begin + EVALUATION_SECONDS:
        model(*args, **kwargs)
    model.train()


def main(name: str, budget: str, steps: int, profile: str = "", extra: str = "") -> None:
    """Train, and print."""
    torch.set_num_threads(1)
    known = elbowroom.load(HardwareProfile, profile) if profile else None
    if extra == "warm":
        warm_up(name, known)
        print(json.dumps({"warm": True}), flush=True)
        sys.stdin.readline()
    lease = elbowroom.wait_for_lease(LEAST, name=name) if budget == "shared" else budget
    model, optimizer, step = MODELS[name]().make()
    room = elbowroom.fit(model, optimizer, lease, strategy="tensile", op_time_store=False, profile=known)
    losses, budgets, inputs = [], [], []
    model.register_forward_pre_hook(lambda _, *given: inputs.append(given), with_kwargs=True)
    levels = [(time.monotonic(), room._ledger.live_bytes)]
    move_state_out = room.move_state_out

    def note_moves() -> int:
        held_bytes = move_state_out()
        levels.append((time.monotonic(), held_bytes))
        return held_bytes

    room.move_state_out = note_moves  # type: ignore[method-assign]
    for index in range(steps):
        with room.step():
            begin = time.monotonic()
            losses.append(float(step(index % BATCHES)).hex())
        peak_bytes = int(room.metrics()["peak_bytes"])
        levels += [(begin, peak_bytes), (time.monotonic(), room._ledger.live_bytes)]
        budgets.append((peak_bytes, room.budget_bytes))
        print(json.dumps({"step": index}), flush=True)
        if extra == "evaluate" and index == steps // 2:
            print(json.dumps({"evaluates": time.monotonic()}), flush=True)
            evaluate(model, inputs[-1])
            print(json.dumps({"evaluated": time.monotonic()}), flush=True)
        inputs.clear()
    room.move_state_out()  # reading it below brings it back
    found: dict[str, Any] = {"losses": losses, "digest": hash_parameters(model), "levels": levels, "budgets": budgets}
    room.detach()
    found["levels"].append((time.monotonic(), 0))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
