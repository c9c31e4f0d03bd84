"""Callbacks of futures beside a distributed room: their ops are no part of a step, and what they write is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ranks.future_callbacks import UnwatchedCallbacks
from elbowroom.room import Room

STEPS = 5


class Gated(nn.Module):
    """Each layer reads the gate. A callback clears it after the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch) * (gate * 1.5).sigmoid()
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        future.then(lambda done: (gate.zero_(), 0)[1])
        return batch


def train(room: Room | None, model: Gated, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train. Return losses and gradients."""
    found = []
    for index in range(STEPS):
        generator = torch.Generator().manual_seed(index)
        batch, gate = (torch.randn(1000, 64, generator=generator) for _ in range(2))
        with contextlib.nullcontext() if room is None else room.step():
            loss = model(batch, gate).square().mean()
            loss.backward()
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
    return found


def make_job() -> tuple[Gated, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Gated()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


@pytest.fixture
def unwatched() -> Iterator[None]:
    with contextlib.closing(UnwatchedCallbacks()):
        yield
    assert torch._C.Future.then.__name__ == "then" and not hasattr(torch._C.Future.then, "__wrapped__")


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("budget", [5_600_000, 4_700_000])
def test_writes_of_callbacks_are_noticed(budget: int, profile: HardwareProfile) -> None:
    plain = train(None, *make_job())
    model, optimizer = make_job()
    options = {"strategy": "recompute_all", "min_offload_bytes": 256, "op_time_store": False}
    with elbowroom.fit(model, optimizer, budget, profile=profile, **options) as room:
        found = train(room, model, optimizer)
        steps = room.journal().steps
        assert room.planned is None or all("zero_" not in op.name for op in room.planned.trace.ops)
    assert [index for index, each in enumerate(found) if not torch.equal(each, plain[index])] == []
    assert any(each.recomputed for each in steps) or steps[-1].mode is Mode.DYNAMIC
