"""Saves and needs of storages that stay: only logged, and told the online policy when it has to decide."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom._family import names
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.residency import policies
from elbowroom.residency.access_history import StepAccesses
from elbowroom.runtime.step_runner import StepRunner

WIDTH, LAYERS, STEPS = 64, 20, 4

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Outcome = tuple[list[torch.Tensor], int]


def find_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def write_late(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Writes to what autograd has saved, which PyTorch does not notice, and saves it again."""
    saved = model[:8](x).tanh()
    hidden = model[8:](saved)
    saved.data.mul_(0.5)
    return (hidden * saved).square().mean() + saved.exp().mean()


def use_threads(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Another thread needs and releases saved tensors while this one saves some."""
    x = x.detach().requires_grad_()
    inner = model[: LAYERS // 2](x).square().mean()
    gradients: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: gradients.extend(torch.autograd.grad(inner, x)))
    thread.start()
    loss = model[LAYERS // 2 :](x.detach()).square().mean()
    thread.join()
    return loss + gradients[0].square().sum()


def run(loss_of: Loss, profile: HardwareProfile, budget_bytes: int | None, **options: Any) -> Outcome:
    """Train with another number of rows in each step. Return what training leaves behind, and the peak in a room."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(700 + 37 * (index * 5 % 7), WIDTH) for index in range(STEPS)]
    if budget_bytes is None:
        return [train(model, optimizer, loss_of, batch) for batch in batches] + list(model.state_dict().values()), 0
    options = {"mode": "dynamic", "min_offload_bytes": 1024, "profile": profile, "manages": "activations"} | options
    losses = []
    with elbowroom.fit(model, [optimizer], budget_bytes, **options) as room:
        for batch in batches:
            with room.step():
                losses.append(train(model, optimizer, loss_of, batch))
        peak_bytes = max(record.peak_bytes or 0 for record in room.journal().steps)
    assert peak_bytes <= budget_bytes
    return [*losses, *model.state_dict().values()], peak_bytes


def run_both(loss_of: Loss, profile: HardwareProfile) -> Outcome:
    """Train without a room. Return what that leaves behind, and the peak in a room in which everything fits."""
    return run(loss_of, profile, None)[0], run(loss_of, profile, 1 << 30, policy="lru")[1]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Loss, batch: torch.Tensor) -> torch.Tensor:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of the runner by its event, and of events of the last steps."""
    counts: Counter[str] = Counter()

    def count(name: str) -> None:
        method = getattr(StepRunner, name)

        def call(self: StepRunner, *args: Any) -> Any:
            counts[name] += 1
            return method(self, *args)

        monkeypatch.setattr(StepRunner, name, call)

    for name in ("save", "need", "move", "retire"):
        count(name)
    finish = StepRunner.finish

    def note_events(self: StepRunner) -> None:
        counts["saves"] += self.state.saved_tensors.saves
        counts["needs"] += self.state.saved_tensors.needs
        finish(self)

    monkeypatch.setattr(StepRunner, "finish", note_events)
    return counts


@pytest.mark.parametrize(("policy", "share"), [("dtr", 5), ("predictive", 2)])  # the latter plans its second step
def test_python_is_told_of_few_events(policy: str, share: int, profile: HardwareProfile, told: Counter[str]) -> None:
    plain, peak_bytes = run_both(find_loss, profile)
    found, _ = run(find_loss, profile, int(0.9 * peak_bytes), policy=policy)
    assert_same(plain, found)
    assert min(told["saves"], told["needs"]) > 200
    assert 0 < told["need"] + told["save"] + told["move"] + told["retire"] < (told["saves"] + told["needs"]) // share


@pytest.mark.parametrize("share", [0.9, 0.5])
@pytest.mark.parametrize("policy", names(policies))
def test_policies_that_are_told_late(policy: str, share: float, profile: HardwareProfile) -> None:
    plain, peak_bytes = run_both(find_loss, profile)
    found, _ = run(find_loss, profile, int(share * peak_bytes), policy=policy)
    assert_same(plain, found)


@pytest.mark.parametrize("share", [0.95, 0.7])
@pytest.mark.parametrize("loss_of", [write_late, use_threads])
def test_writes_and_threads(loss_of: Loss, share: float, profile: HardwareProfile) -> None:
    plain, peak_bytes = run_both(loss_of, profile)
    for policy in ("predictive", "dtr"):
        found, _ = run(loss_of, profile, int(share * peak_bytes), policy=policy)
        assert_same(plain, found)


def test_history_is_whole(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefetch plans are made of all events of a step in which memory was short."""
    steps: list[tuple[StepAccesses, int, int]] = []
    finish = StepRunner.finish

    def note(self: StepRunner) -> None:
        finish(self)
        accesses = self._policy._online.history.present
        steps.append((accesses, self.state.saved_tensors.saves, self.state.saved_tensors.needs))

    monkeypatch.setattr(StepRunner, "finish", note)
    _, peak_bytes = run_both(find_loss, profile)
    run(find_loss, profile, int(0.7 * peak_bytes))
    assert any(accesses.was_tight for accesses, _, _ in steps)
    for accesses, saves, needs in steps:
        if accesses.was_tight:
            assert len(accesses.saves) == saves and accesses.needs == needs
            assert len(accesses.seconds) == saves + needs and accesses.seconds == sorted(accesses.seconds)
