"""Models whose steps leave out layers at random (LayerDrop): near the budget no step runs unwatched too early."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode

LAYERS, WIDTH, ROWS, STEPS = 8, 128, 512, 12


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.3:
                x = x + layer(x)
        return x.square().mean()


def train(seed: int, budget_bytes: int = 0, profile: HardwareProfile | None = None) -> tuple[list[float], list[Mode]]:
    """Return the losses, and the modes of the steps."""
    torch.manual_seed(0)
    model, x = Dropping(), torch.randn(ROWS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    room = elbowroom.fit(model, optimizer, budget_bytes, profile=profile) if budget_bytes else None
    torch.manual_seed(seed)
    losses = []
    for _ in range(STEPS):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if room is None:
        return losses, []
    assert (room.journal().peak_bytes or 0) <= budget_bytes
    room.detach()
    return losses, [each.mode for each in room.journal().steps]


@pytest.mark.parametrize(("seed", "budget_bytes"), [(1, 22_196_284), (3, 13_381_944)])
def test_layers_that_are_left_out_at_random(seed: int, budget_bytes: int, profile: HardwareProfile) -> None:
    losses, modes = train(seed, budget_bytes, profile)
    assert losses == train(seed)[0]
    assert modes[0] is Mode.CAPTURE and modes[1] is not Mode.PLAIN


def test_a_strategy_that_keeps_state_says_so(profile: HardwareProfile) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        model(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(Infeasible, match=r'strategy="offload_all" keep parameters, .*"auto" can move them'):
        elbowroom.fit(model, optimizer, 4 << 20, profile=profile, strategy="offload_all", step=step)
