"""Programs that call backward in several steps before an optimizer updates for the first time, and makes its state."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from elbowroom.ir.hardware import HardwareProfile
from elbowroom.tracing.residents import FirstUpdates
from tests.state_jobs import (
    PARAMETER_BYTES,
    StateJob,
    adamw,
    assert_same,
    make_batch,
    make_model,
    run_plain,
    run_within,
)

UPDATE_EVERY = 3
STEPS = 4 * UPDATE_EVERY


def make_accumulating_job(*, updates: bool = True) -> StateJob:
    """A loop whose every third step updates."""
    model = make_model()
    optimizer = adamw(model.parameters())

    def step(index: int) -> torch.Tensor:
        loss = model(make_batch(index)).square().mean() / UPDATE_EVERY
        loss.backward()
        if updates and index % UPDATE_EVERY == UPDATE_EVERY - 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def make_alternating_job() -> StateJob:
    """A loop whose second optimizer updates for the first time when the first one has updated three times."""
    model = make_model()
    halves = [adamw(half.parameters()) for half in (model[:5], model[5:])]

    def step(index: int) -> torch.Tensor:
        loss = model(make_batch(index)).square().mean()
        loss.backward()
        halves[(index // UPDATE_EVERY) % 2].step()
        for each in halves:
            each.zero_grad()
        return loss.detach()

    return StateJob(model, list(halves), step)


@pytest.mark.parametrize("share", [2.3, 2.6, 3.0, 3.5, 3.9], ids=str)
@pytest.mark.parametrize("make", [make_accumulating_job, make_alternating_job])
def test_state_that_comes_in_a_later_step(make: Callable[[], StateJob], share: float, profile: HardwareProfile) -> None:
    """Earlier steps, planned without that state, fit without any move."""
    budget_bytes = int(share * PARAMETER_BYTES)
    assert_same(run_plain(make, STEPS), run_within(make, profile, budget_bytes, STEPS, mode="auto"))


@pytest.mark.parametrize(
    "make_optimizer",
    [adamw, torch.optim.SGD, functools.partial(torch.optim.SGD, momentum=0.9)],
    ids=["with state", "without", "with momentum"],
)
def test_the_first_update_is_noticed(make_optimizer: Callable[[Any], Optimizer]) -> None:
    model = make_model(2)
    optimizer = make_optimizer(model.parameters())
    updates = FirstUpdates([optimizer])
    assert FirstUpdates([]).are_over()
    for _ in range(2):
        model(make_batch(0)).sum().backward()
        assert not updates.are_over()
    optimizer.step()
    assert updates.are_over()
    loaded = make_optimizer(model.parameters())
    loaded.load_state_dict(optimizer.state_dict())
    assert FirstUpdates([loaded]).are_over() == bool(optimizer.state)
