"""Several models of one step within one budget: all of them may leave."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elbowroom
from elbowroom.errors import UsageError
from elbowroom.hooks.several_models import SeveralModels
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from tests.state_jobs import PARAMETER_BYTES, STEPS, adamw, make_batch, make_model

BUDGET = 3 * PARAMETER_BYTES // 2
"""Weights and optimizer state take three times as much, and gradients come on top."""


class Teacher(nn.Sequential):
    """A larger model than the one that is trained."""


class Distillation:
    """A student learns from a frozen teacher, and an average of its weights is kept."""

    def __init__(self) -> None:
        self.student = make_model(4)
        self.teacher = Teacher(*make_model(14)).requires_grad_(False).eval()
        self.average = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = adamw(self.student.parameters())

    @property
    def models(self) -> list[nn.Module]:
        return [self.student, self.teacher, self.average]

    def step(self, index: int = 0) -> torch.Tensor:
        batch = make_batch(index)
        with torch.no_grad():
            wanted = self.teacher(batch)
        loss = (self.student(batch) - wanted).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.student)
        return loss.detach()

    def list_tensors(self) -> list[torch.Tensor]:
        return [each.detach().clone() for one in self.models for each in (*one.parameters(), *one.buffers())]


@pytest.mark.parametrize("options", [{"mode": "dynamic"}, {}], ids=["dynamic", "auto"])
def test_a_teacher_and_an_average_leave(options: dict[str, Any], profile: HardwareProfile) -> None:
    plain = Distillation()
    losses = [plain.step(index) for index in range(STEPS)]

    job = Distillation()
    with elbowroom.fit(job.models, job.optimizer, BUDGET, profile=profile, min_offload_bytes=256, **options) as room:
        found = []
        for index in range(STEPS):
            with room.step():
                found.append(job.step(index))
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= BUDGET
        if not options:
            assert room.planned is not None
            trace = room.planned.trace
            assert trace.name == "Sequential"
            modules = {each.module for each in trace.storages}
            assert {"3.0", "Teacher.13.0"} <= modules, modules
    assert losses == found
    assert all(torch.equal(one, other) for one, other in zip(plain.list_tensors(), job.list_tensors(), strict=True))


def test_models_beside_the_first_are_not_kept_alive(profile: HardwareProfile) -> None:
    job = Distillation()
    with elbowroom.fit(job.models, job.optimizer, 1 << 30, profile=profile) as room:
        for index in range(4):
            with room.step():
                job.step(index)
        teacher = weakref.ref(job.teacher)
        job.teacher = Teacher(*make_model(14)).requires_grad_(False)
        gc.collect()
        assert teacher() is None
        with room.step():
            job.step(1)
        with pytest.raises(UsageError, match="already has a room"):
            elbowroom.fit(job.student, job.optimizer, 1 << 30, profile=profile)
        with pytest.raises(UsageError, match="already has a room"):
            elbowroom.fit(job.average, job.optimizer, 1 << 30, profile=profile)
    elbowroom.fit(job.student, job.optimizer, 1 << 30, profile=profile).detach()


def test_the_smallest_budget_of_several_models(profile: HardwareProfile) -> None:
    student, teacher = make_model(4), Teacher(*make_model(14)).requires_grad_(False)
    optimizer = adamw(student.parameters())

    def step() -> None:
        (student(make_batch(0)) - teacher(make_batch(0))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 256}
    nbytes = elbowroom.smallest_budget([student, teacher], optimizer, step, **options)
    assert nbytes < PARAMETER_BYTES
    with elbowroom.fit([student, teacher], optimizer, nbytes + 4096, step=step, **options) as room:
        for _ in range(3):
            with room.step():
                step()
        assert [record.mode for record in room.journal().steps] == [Mode.PLANNED] * 3


def test_lists_that_are_refused(profile: HardwareProfile) -> None:
    model = make_model(1)
    optimizer = adamw(model.parameters())
    with pytest.raises(UsageError, match="the list of models is empty"):
        elbowroom.fit([], optimizer, 1 << 30, profile=profile)
    with pytest.raises(UsageError, match="this list has Tensor in it"):
        elbowroom.fit([model, torch.ones(2)], optimizer, 1 << 30, profile=profile)  # type: ignore[list-item]


def test_names_of_several_models() -> None:
    one = SeveralModels([nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    assert [name for name, _ in one.named_parameters()] == ["weight", "bias"]
    first, *others = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    several = SeveralModels([first, *others])
    assert [name for name, _ in several.named_parameters()] == ["weight", "Linear.weight", "Linear_2.weight"]
