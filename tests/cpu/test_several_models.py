"""Several models of one step within one budget: all of them may leave."""

from __future__ import annotations

import contextlib
import gc
import pathlib
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
from elbowroom.ir.unused_state import list_unused_state
from elbowroom.room import Room
from elbowroom.runtime.state_tensors import StateTensors
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


UNUSED = {
    "exp_avg",
    "exp_avg_sq",
    "Teacher.3.0.weight",
    "AveragedModel.module.1.0.weight",
    "gradient of Sequential.5.0.weight",
}


class Alternation(Distillation):
    """Steps use the student; every fifth updates the average, and a critic with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = make_model(6)
        self.second = adamw(self.critic.parameters())

    @property
    def models(self) -> list[nn.Module]:
        return [*super().models, self.critic]

    def step(self, index: int = 0) -> torch.Tensor:
        batch = make_batch(index)
        loss = self.student(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if index % 5 == 0:
            self.average.update_parameters(self.student)
            self.second.zero_grad()
            self.critic(batch).square().mean().backward()
            self.second.step()
        return loss.detach()

    def list_tensors(self) -> list[torch.Tensor]:
        states = (each for one in (self.optimizer, self.second) for each in one.state.values())
        return [*super().list_tensors(), *(each.clone() for state in states for each in state.values())]


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8, 2.0])
@pytest.mark.parametrize("evaluates", [False, True], ids=["", "evaluates"])
def test_state_that_steps_do_not_use_is_away(share: float, evaluates: bool, profile: HardwareProfile) -> None:
    def run(job: Alternation, steps: range, room: Room | None) -> list[torch.Tensor]:
        found = []
        for index in steps:
            with contextlib.nullcontext() if room is None else room.step():
                found.append(job.step(index))
            if evaluates:
                with torch.no_grad():
                    found.append(job.teacher(make_batch(index)).sum() + job.average(make_batch(index)).sum())
        return found

    plain = Alternation()
    expected = run(plain, range(16), None)
    job = Alternation()
    budget_bytes = int(share * (sum(each.nbytes for each in plain.list_tensors()) + PARAMETER_BYTES))
    with elbowroom.fit(
        job.models, [job.optimizer, job.second], budget_bytes, profile=profile, min_offload_bytes=256
    ) as room:
        found = run(job, range(10), room)
        fits = share > 1
        modes = [record.mode for record in room.journal().steps]
        assert modes[6:] == [Mode.PLAIN if fits else Mode.PLANNED] * 4
        assert room.planned is not None
        names = {each.label for each in list_unused_state(room.planned.trace)}
        assert (names == set()) if fits else (names >= UNUSED)
        assert room.planned.is_plain == fits
        found += run(job, range(10, 16), room)
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget_bytes
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(one, other) for one, other in zip(plain.list_tensors(), job.list_tensors(), strict=True))


def test_unused_state_stays_in_a_larger_budget(profile: HardwareProfile) -> None:
    job = Alternation()
    optimizers = [job.optimizer, job.second]
    with elbowroom.fit(job.models, optimizers, 300 << 10, profile=profile, min_offload_bytes=256) as room:
        for index in range(20):
            with room.step():
                job.step(index + index // 5 + 1)
            if index == 4:
                assert room.planned is not None and not room.planned.is_plain
                room.set_budget("1GiB")
            if index == 12:
                assert room.metrics()["mode"] == "plain"
                room.set_budget(300 << 10)
        assert room.metrics()["mode"] == "planned"
        assert [record.mode for record in room.journal().steps].count(Mode.CAPTURE) <= 6


@pytest.mark.parametrize("kib", [300, 840])
def test_plans_know_the_state_of_each_optimizer(kib: int, profile: HardwareProfile) -> None:
    """The first one of two with the same labels and sizes does not step."""
    job = Alternation()
    optimizers = [job.second, job.optimizer]
    with elbowroom.fit(job.models, optimizers, kib << 10, profile=profile, min_offload_bytes=256) as room:
        for index in range(5):
            with room.step():
                job.step(index)
        assert room.planned is not None
        trace = room.planned.trace
        found = StateTensors(trace).find(room._job.list_kept(), room._job.name_residents)
        owners = {id(each): one for one in optimizers for state in one.state.values() for each in state.values()}
        states = [each for each in trace.storages if each.label == "exp_avg" and each.id in found]
        used = {owners[id(found[each.id])] for each in states if each.nbytes}
        assert used == {job.optimizer}
        assert {owners[id(found[each.id])] for each in states if not each.nbytes} == {job.second}


@pytest.mark.parametrize("is_ahead", [False, True], ids=["", "planned ahead"])
def test_the_smallest_budget_leaves_out_what_the_step_does_not_use(is_ahead: bool, profile: HardwareProfile) -> None:
    job = Alternation()
    options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 256}
    optimizers = [job.optimizer, job.second]
    nbytes = elbowroom.smallest_budget(job.models, optimizers, lambda: job.step(1), **options)
    assert nbytes < sum(each.nbytes for each in job.teacher.parameters())
    ahead = {"step": lambda: job.step(1)} if is_ahead else {}
    with elbowroom.fit(job.models, optimizers, nbytes, **options, **ahead) as room:
        for index in range(1, 5):
            with room.step():
                job.step(index)
        records = room.journal().steps
        assert records[-1].mode is Mode.PLANNED
        assert max(record.peak_bytes or 0 for record in records) <= nbytes


def test_a_resumed_job_has_unused_state_away(profile: HardwareProfile) -> None:
    job = Alternation()

    def fit() -> Room:
        optimizers = [job.optimizer, job.second]
        return elbowroom.fit(job.models, optimizers, 300 << 10, profile=profile, min_offload_bytes=256)

    with fit() as room:
        for index in range(4):
            with room.step():
                job.step(index)
        learned = room.state_dict()
    with fit() as room:
        room.load_state_dict(learned)
        for index in range(6, 9):
            with room.step():
                job.step(index)
        assert [record.mode for record in room.journal().steps] == [Mode.PLANNED] * 3
        assert room.metrics()["max_peak_bytes"] <= 300 << 10
    plain = Alternation()
    for index in (*range(4), *range(6, 9)):
        plain.step(index)
    assert all(torch.equal(one, other) for one, other in zip(plain.list_tensors(), job.list_tensors(), strict=True))


@pytest.mark.parametrize(
    ("nbytes", "options"), [(1 << 30, {}), (2 << 20, {"manages": "activations"}), (300 << 10, {"strategy": "tensile"})]
)
def test_what_was_learned_with_unused_state_away_is_learned_again_elsewhere(
    nbytes: int, options: dict[str, Any], profile: HardwareProfile, tmp_path: pathlib.Path
) -> None:
    job = Alternation()
    options = {"profile": profile, "min_offload_bytes": 256} | options
    optimizers = [job.optimizer, job.second]
    with elbowroom.fit(job.models, optimizers, 300 << 10, profile=profile, min_offload_bytes=256) as room:
        for index in range(4):
            with room.step():
                job.step(index)
        learned = room.state_dict()
    with elbowroom.fit(job.models, optimizers, nbytes, **options) as room:
        room.load_state_dict(learned)
        assert room.planned is None
        for index in range(6, 10):
            with room.step():
                job.step(index)
        if nbytes > 300 << 10:
            assert room._pager.count_away() == 0
        torch.save(job.teacher.state_dict(), tmp_path / "teacher.pt")
        assert room.metrics()["max_peak_bytes"] <= nbytes


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("share", [0.55, 0.7, 0.85])
def test_updates_every_few_steps_are_not_captured_for_ever(every: int, share: float, profile: HardwareProfile) -> None:
    job = Distillation()
    nbytes = int(share * (sum(each.nbytes for each in job.list_tensors()) + 2 * PARAMETER_BYTES // 3))
    with elbowroom.fit(job.models, job.optimizer, nbytes, profile=profile, min_offload_bytes=256) as room:
        for index in range(24 * every):
            with room.step():
                job.student(make_batch(index)).square().mean().backward()
                if index % every == every - 1:
                    job.optimizer.step()
                    job.optimizer.zero_grad()
        records = room.journal().steps
        assert max(record.peak_bytes or 0 for record in records) <= nbytes
        last = [record.mode for record in records[len(records) // 2 :]]
        assert last.count(Mode.CAPTURE) <= 2, last


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
