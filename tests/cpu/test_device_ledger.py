"""Rooms whose allocator refuses as CUDA's does: the same bits, and the budget held."""

from __future__ import annotations

import pytest
import torch

import elbowroom
from elbowroom.hooks.ledger import POOL_PAGE_BYTES
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.problem import pose
from elbowroom.room import Room
from tests.device_ledger import use_device_ledger
from tests.models import MODELS

NO_LIMIT_BYTES = 1 << 50
STEPS = 6


def train(
    name: str, budget_bytes: int | None, profile: HardwareProfile, steps: int = STEPS, **options: object
) -> tuple[list[torch.Tensor], Room | None]:
    """Losses and state after some steps."""
    model, optimizer, step = MODELS[name]().make()
    if budget_bytes is None:
        losses = [step(index) for index in range(steps)]
        return [*losses, *(each.detach() for each in (*model.parameters(), *model.buffers()))], None
    with elbowroom.fit(model, optimizer, budget_bytes, profile=profile, **options) as room:
        losses = []
        for index in range(steps):
            with room.step():
                losses.append(step(index))
    return [*losses, *(each.detach() for each in (*model.parameters(), *model.buffers()))], room


@pytest.mark.parametrize(
    ("name", "share", "options"),
    [
        ("resnet50", 0.0, {}),  # model state moves
        ("vit", 0.0, {}),
        ("gpt2", 0.1, {"mode": "dynamic"}),  # ops are refused, and repeated
        ("lstm", 0.1, {"mode": "dynamic"}),
        ("vgg16_bn", 0.1, {"mode": "dynamic"}),  # convolutions and updates of statistics, which are refused nothing
    ],
)
def test_bits_and_budget(
    name: str,
    share: float,
    options: dict[str, object],
    profile: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, _ = train(name, None, profile)
    _, room = train(name, NO_LIMIT_BYTES, profile, steps=3)
    assert room is not None and room.planned is not None
    floor_bytes = pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes
    budget_bytes = int((floor_bytes + share * (room.planned.forecast.peak_bytes - floor_bytes)) * 1.01)
    ledgers = use_device_ledger(monkeypatch)
    ours, room = train(name, budget_bytes, profile, **options)
    assert room is not None and len(ledgers) == 1
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    records = room.journal().steps
    told = [(str(each.mode), (each.peak_bytes or 0) / budget_bytes, each.note) for each in records]
    assert max(each.peak_bytes or 0 for each in records[3:]) <= budget_bytes, told
    # What an op takes within itself is only known once it has set a peak.
    assert max(each.peak_bytes or 0 for each in records) <= budget_bytes + POOL_PAGE_BYTES, told
    if options:
        assert ledgers[0].refusals > 0, "nothing was refused"
    else:
        assert records[-1].mode is Mode.PLANNED, told
