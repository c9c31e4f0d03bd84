"""Writes of threads that are not watched: nothing is computed again from what they have changed."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import SavedTensorLost
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room

STEPS = 4


def run_elsewhere(write: Callable[[], Any]) -> None:
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


class Gated(nn.Module):
    """Each layer reads the gate. A thread clears it after the forward pass."""

    gate: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.register_buffer("gate", torch.zeros(1000, 64))
        self.is_cleared = True

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.gate.copy_(gate)
        return self.run_layers(batch)

    def run_layers(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch) * (self.gate * 1.5).sigmoid()  # autograd saves the sigmoid's result, not the gate
        if self.is_cleared:
            run_elsewhere(self.gate.zero_)
        return batch


class FilledWithoutGradients(Gated):
    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.gate.copy_(gate)
        return self.run_layers(batch)


class FilledThroughData(Gated):
    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.gate.data.copy_(gate)
        return self.run_layers(batch)


class FilledByBatchNorm(Gated):
    """Batch norm writes to its statistics, which are rows of the gate, without raising the version counter."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        nn.functional.batch_norm(gate, self.gate[0], self.gate[1], training=True)
        return self.run_layers(batch)


class WrittenTwice(Gated):
    """After the thread, the step writes as well."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        batch = super().forward(batch, gate)
        self.gate.copy_(2 * gate)
        return batch


class Replaced(Gated):
    """The gate gets other contents, and is written to then. No thread writes."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.is_cleared = False
        batch = super().forward(batch, gate)
        self.gate.data = torch.zeros_like(self.gate)
        self.gate.add_(1)
        return batch


@torch.library.custom_op("elbowroom_tests::clear_gate", mutates_args=("gate",))
def clear_gate(gate: torch.Tensor) -> None:
    gate.zero_()


class ClearedByCustomOp(Gated):
    """A custom op writes to the gate, and raises its version counter before. No thread writes."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.is_cleared = False
        batch = super().forward(batch, gate)
        clear_gate(self.gate)
        return batch


class DoubledInputs(Gated):
    """A thread writes to the input of a sigmoid, whose result autograd saves."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch) + gate
            run_elsewhere(functools.partial(batch.detach().mul_, 2))
            batch = batch.sigmoid()
        return batch


class DoubledResults(Gated):
    """A thread writes to a result before autograd saves it."""

    def forward(self, batch: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch) + gate
            run_elsewhere(functools.partial(batch.detach().mul_, 2))
            batch = batch.sin()
        return batch


def train(room: Room | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Train. Return losses and gradients."""
    found = []
    for index in range(STEPS):
        generator = torch.Generator().manual_seed(index)
        batch, gate = (torch.randn(1000, 64, generator=generator) for _ in range(2))
        with contextlib.nullcontext() if room is None else room.step():
            optimizer.zero_grad()
            loss = model(batch, gate).square().mean()
            loss.backward()
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]
            optimizer.step()
    return found


def make_job(kind: type[Gated]) -> tuple[Gated, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def fit(
    model: nn.Module, optimizer: torch.optim.Optimizer, budget: int, profile: HardwareProfile, **options: Any
) -> Room:
    return elbowroom.fit(
        model, optimizer, budget, profile=profile, min_offload_bytes=256, op_time_store=False, **options
    )


RECOMPUTING = [{"strategy": "recompute_all"}, {"mode": "dynamic", "policy": "dtr"}]


@pytest.mark.parametrize("kind", [FilledWithoutGradients, FilledThroughData, FilledByBatchNorm, WrittenTwice])
def test_the_write_is_found_however_the_tensor_was_filled(kind: type[Gated], profile: HardwareProfile) -> None:
    model, optimizer = make_job(kind)
    room = fit(model, optimizer, 4_700_000, profile, **RECOMPUTING[1])
    with room, pytest.raises(SavedTensorLost, match="a thread of the program"):
        train(room, model, optimizer)


@pytest.mark.parametrize("kind", [Replaced, ClearedByCustomOp])
@pytest.mark.parametrize("options", RECOMPUTING)
def test_the_step_may_write_by_itself(options: Any, kind: type[Gated], profile: HardwareProfile) -> None:
    expected = train(None, *make_job(kind))
    model, optimizer = make_job(kind)
    with fit(model, optimizer, 4_700_000, profile, **options) as room:
        found = train(room, model, optimizer)
        recomputed = sum(each.recomputed for each in room.journal().steps)
        assert recomputed > 0 or "strategy" in options  # a plan may keep what is written to
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("options", RECOMPUTING)
def test_no_result_is_computed_from_what_another_thread_has_written(options: Any, profile: HardwareProfile) -> None:
    model, optimizer = make_job(Gated)
    with fit(model, optimizer, 4_700_000, profile, **options) as room:
        with pytest.raises(SavedTensorLost, match="a thread of the program"):
            train(room, model, optimizer)
        model.is_cleared = False
        model.load_state_dict(make_job(Gated)[0].state_dict())
        found = train(room, model, optimizer)
        assert sum(each.recomputed for each in room.journal().steps) > 0
    plain, plain_optimizer = make_job(Gated)
    plain.is_cleared = False
    assert all(map(torch.equal, found, train(None, plain, plain_optimizer)))


@pytest.mark.parametrize("options", [*RECOMPUTING, {}])
@pytest.mark.parametrize("kind", [DoubledInputs, DoubledResults])
def test_what_another_thread_has_written_is_not_computed_again(
    kind: type[Gated], options: Any, profile: HardwareProfile
) -> None:
    expected = train(None, *make_job(kind))
    model, optimizer = make_job(kind)
    with fit(model, optimizer, 4_700_000, profile, **options) as room:
        found = train(room, model, optimizer)
    assert all(map(torch.equal, found, expected))
