"""Copies and pickles of a model in a room, made at any time, are those of plain PyTorch, also of parts like LSTMs."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.ir.hardware import HardwareProfile

WIDTH = 16
PLENTY = 1 << 30


class Last(nn.Module):
    """Returns the output of an LSTM, which has a `__getstate__` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


class TopLSTM(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


def replicate(model: nn.Module) -> nn.Module:
    """Return a replica as `DataParallel` makes it, of the whole model."""
    replica = model._replicate_for_data_parallel()  # type: ignore[operator]
    for name, child in replica._modules.items():
        replica._modules[name] = replicate(child)
    for name, each in list(model._parameters.items()):
        setattr(replica, name, nn.Parameter(each.detach().clone()))
    return replica


def load(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def shallow(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters are others, also of its parts."""
    copied = copy.copy(model)
    copied._modules = {name: shallow(each) for name, each in model._modules.items()}  # type: ignore[assignment]
    copied._parameters = {name: nn.Parameter(each.detach().clone()) for name, each in model._parameters.items()}  # type: ignore[assignment, union-attr]
    if isinstance(copied, nn.RNNBase):
        copied._flat_weights = [getattr(copied, name) for name in copied._flat_weights_names]
    return copied


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for index in range(steps):
        x = torch.randn(8, 5, WIDTH, generator=torch.Generator().manual_seed(index))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_and_copy(
    make: Callable[[], nn.Module], copy_model: Callable[[nn.Module], nn.Module], before: int, fit: Callable[..., Any]
) -> tuple[torch.Tensor, ...]:
    """Copy a model after some steps, go on with both, and return what both return."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fit(model, optimizer):
        train(model, optimizer, before)
        copied = copy_model(model)
        train(model, optimizer, 3)
        train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), 2)
        assert not any(each.grad is not None and each.grad.any() for each in model.parameters())
        x = torch.ones(2, 5, WIDTH)
        return model(x).detach(), copied(x).detach()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("copy_model", [copy.deepcopy, load, shallow, replicate])
@pytest.mark.parametrize("make", [Last, lambda: TopLSTM(WIDTH, WIDTH, batch_first=True), lambda: nn.Linear(WIDTH, 4)])
def test_copies(
    make: Callable[[], nn.Module],
    copy_model: Callable[[nn.Module], nn.Module],
    before: int,
    profile: HardwareProfile,
) -> None:
    plain = make_and_copy(make, copy_model, before, lambda *_: contextlib.nullcontext())
    found = make_and_copy(
        make, copy_model, before, lambda *job: elbowroom.fit(*job, PLENTY, profile=profile, op_time_store=False)
    )
    for one, other in zip(plain, found, strict=True):
        assert torch.equal(one, other)


def test_a_shallow_copy_is_fitted(profile: HardwareProfile) -> None:
    """It was made while the original had a room, and has the attributes of the original."""

    def train_copy(fit: Callable[..., Any]) -> torch.Tensor:
        torch.manual_seed(0)
        model = TopLSTM(WIDTH, WIDTH, batch_first=True)
        with fit(model, torch.optim.SGD(model.parameters(), lr=0.5)):
            copied = shallow(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.5)
        with fit(copied, optimizer):
            train(copied, optimizer, 3)
        return copied(torch.ones(2, 5, WIDTH)).detach()

    found = train_copy(lambda *job: elbowroom.fit(*job, PLENTY, profile=profile, op_time_store=False))
    assert torch.equal(found, train_copy(lambda *_: contextlib.nullcontext()))
