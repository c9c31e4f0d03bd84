"""Two rooms, where the step of one reads weights that have left in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room

STEPS, WIDTH, ROWS = 5, 256, 64


def make_network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs)
    )


def train(fit: Callable[[nn.Module, torch.optim.Optimizer], Room] | None) -> list[float]:
    """Train a GAN, whose generator's step goes through the discriminator. Return the losses."""
    torch.manual_seed(0)
    generator, discriminator = make_network(32, 64), make_network(64, 1)
    first, second = torch.optim.Adam(generator.parameters()), torch.optim.Adam(discriminator.parameters())
    rooms = [] if fit is None else [fit(generator, first), fit(discriminator, second)]
    losses = []
    for _ in range(STEPS):
        made = generator(torch.randn(ROWS, 32))
        real = functional.softplus(-discriminator(torch.randn(ROWS, 64))).mean()
        loss = real + functional.softplus(discriminator(made.detach())).mean()
        loss.backward()
        second.step()
        second.zero_grad()
        losses.append(loss.item())
        loss = functional.softplus(-discriminator(made)).mean()
        loss.backward()
        first.step()
        first.zero_grad()
        second.zero_grad()
        losses.append(loss.item())
        del made, real, loss
    for room in rooms:
        pager: Any = room._pager
        assert pager.storages.offloaded_bytes > 0
        room.detach()
    return losses


@pytest.mark.parametrize("budget_bytes", [1_350_000, 1_500_000])
def test_weights_that_another_room_has_moved(
    budget_bytes: int, profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(model: nn.Module, optimizer: torch.optim.Optimizer) -> Room:
        return elbowroom.fit(model, optimizer, budget_bytes, profile=profile, mode="dynamic", min_offload_bytes=1024)

    assert train(fit) == train(None)
    assert "Elbowroom has moved these bytes" not in caplog.text
