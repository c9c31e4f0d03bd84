"""A transfer that fails in the optimizer's step leaves each parameter, with its state, as it was or wholly updated."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim import adam

from elbowroom.errors import Infeasible, TierFull, TransferFailed
from elbowroom.hooks.grouped_step import find_groupable
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.slicing import probe
from elbowroom.tiers.disk import SpillFile
from tests.state_jobs import (
    LAYERS,
    PARAMETER_BYTES,
    StateJob,
    assert_same,
    fit,
    list_tensors,
    make_job,
    make_model,
    run_plain,
    run_within,
)

OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False),
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
}

SGD_STEP = torch.optim.SGD.step

FEW = 6
"""Layers of the model, so that not too many transfers are there to fail."""

PLANNED_AFTER = 5
"""Steps until the plan is made and followed."""


class FailingDisk:
    """Fails at all reads, or all writes, from the one of a given number on."""

    def __init__(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = self.fails_at = 0
        call = getattr(SpillFile, method)

        def call_or_fail(*args: Any) -> None:
            self.count += 1
            if 0 < self.fails_at <= self.count:
                raise OSError(errno.EIO, "broken")
            call(*args)

        monkeypatch.setattr(SpillFile, method, call_or_fail)

    def arm(self, number: int) -> None:
        """Count from here. `number`: of the first call that fails; 0 for none."""
        self.count = 0
        self.fails_at = number


Group = dict[str, torch.Tensor]
"""A parameter with its optimizer state."""


def list_groups(job: StateJob) -> list[Group]:
    (optimizer,) = job.optimizers
    found = []
    for parameter in job.model.parameters():
        state = {key: each for key, each in optimizer.state[parameter].items() if isinstance(each, torch.Tensor)}
        found.append({"parameter": parameter, **state})
    return found


def train_to(make: Callable[[], StateJob], steps: int) -> list[Group]:
    job = make()
    for index in range(steps):
        job.step(index)
    return list_groups(job)


def put_back(job: StateJob, groups: list[Group]) -> None:
    with torch.no_grad():
        for group, other in zip(list_groups(job), groups, strict=True):
            for key, each in group.items():
                each.copy_(other[key])
    job.optimizers[0].zero_grad()


def find_same(groups: list[Group], others: list[Group]) -> list[bool]:
    """Tell of each group whether all of it is the same."""
    return [
        all(torch.equal(each, other[key]) for key, each in group.items())
        for group, other in zip(groups, others, strict=True)
    ]


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Nothing is freed that an error keeps alive in a cycle of references."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("method", ["read", "write"])
@pytest.mark.parametrize(("name", "mode"), [*((name, "auto") for name in OPTIMIZERS), ("adamw foreach", "dynamic")])
def test_a_disk_that_fails_in_a_step(
    name: str, mode: str, method: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> StateJob:
        return make_job(OPTIMIZERS[name], make_model(FEW))

    old, new = train_to(make, PLANNED_AFTER), train_to(make, PLANNED_AFTER + 1)
    job = make()
    disk = FailingDisk(method, monkeypatch)
    outcomes = []
    with fit(job, profile, 3 * PARAMETER_BYTES * FEW // LAYERS // 2, mode=mode, min_offload_bytes=1 << 12) as room:
        for index in range(PLANNED_AFTER):
            with room.step():
                job.step(index)
        number = 0
        is_over = False
        while not is_over:
            number += 1
            assert mode == "dynamic" or room.journal().steps[-1].mode is Mode.PLANNED
            disk.arm(number)
            with contextlib.suppress(TransferFailed, Infeasible), room.step():
                job.step(PLANNED_AFTER)
            is_over = disk.count < number
            disk.arm(0)
            are_new, are_old = find_same(list_groups(job), new), find_same(list_groups(job), old)
            assert all(one or other for one, other in zip(are_new, are_old, strict=True)), number
            outcomes.append("new" if all(are_new) else "old" if all(are_old) else "both")
            put_back(job, old)
            with room.step():  # from here on a plan is followed again
                job.step(PLANNED_AFTER)
            put_back(job, old)
    assert outcomes.count("both") > 5 and "old" in outcomes and outcomes[-1] == "new", outcomes


def test_steps_that_run_in_slices_say_so(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    """No plan fits: each dynamic step has the reason, and bias corrections are no new questions to the probe."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job = StateJob(model, [optimizer], lambda index: torch.empty(0))
    probed: list[int] = []
    seen: list[str] = []
    with (
        fit(job, profile, 7 * 5000 * 64, mode="auto") as room,
        mock.patch.object(probe, "_probe", wraps=probe._probe) as counted,
    ):
        for _ in range(8):
            with room.step():
                model(torch.arange(32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            probed.append(counted.call_count)
        seen = [each.note for each in room.journal().steps if each.mode is Mode.DYNAMIC]
    assert len(seen) > 1 and set(seen) == {"no plan fits the budget, so ops run in slices if need be"}
    assert probed[-1] == probed[3]


@pytest.mark.parametrize("share", [1.2, 1.5, 1.9])
def test_parameters_in_one_buffer(share: float, profile: HardwareProfile) -> None:
    """Parameters and gradients are views of flat buffers: a group of a few needs all of these."""
    count, width = 64, 64

    def make() -> StateJob:
        flat = torch.linspace(-1, 1, count * width)
        gradients = torch.zeros(count * width)
        model = torch.nn.ParameterList(torch.nn.Parameter(flat[each * width :][:width]) for each in range(count))
        for index, parameter in enumerate(model):
            parameter.grad = gradients[index * width :][:width]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(index: int) -> torch.Tensor:
            values = torch.linspace(-1, index + 1, width)
            for parameter in model:
                (parameter * values).square().sum().backward()
            optimizer.step()
            for parameter in model:
                parameter.grad.zero_()
            return values

        return StateJob(model, [optimizer], step)

    plain, job = make(), make()
    for index in range(4):
        plain.step(index)
    with fit(job, profile, int(share * 4 * count * width)) as room:
        for index in range(4):
            with room.step():
                job.step(index)
    assert_same(list_tensors(job), list_tensors(plain))


def add_noise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3)


@pytest.mark.parametrize("where", ["optimizer", "class", "class, later"])
@pytest.mark.parametrize("mode", ["dynamic", "auto"])
def test_a_step_that_the_program_has_replaced_runs_once(where: str, mode: str, profile: HardwareProfile) -> None:
    """Its code would run once for each group of parameters else."""
    calls: list[int] = []

    def make(patch: pytest.MonkeyPatch) -> StateJob:
        job = make_job(OPTIMIZERS["adamw"])
        owner: Any = job.optimizers[0] if where == "optimizer" else torch.optim.AdamW
        inner = owner.step

        @functools.wraps(inner)
        def replaced(*args: Any, **options: Any) -> Any:
            calls.append(1)
            add_noise(job.model)
            return inner(*args, **options)

        def step(index: int) -> torch.Tensor:
            torch.manual_seed(index)
            if where == "class, later" and index == 2:
                patch.setattr(owner, "step", replaced)
            return job.step(index)

        if where != "class, later":
            patch.setattr(owner, "step", replaced)
        return dataclasses.replace(job, step=step)

    with pytest.MonkeyPatch.context() as patch:
        plain = run_plain(lambda: make(patch))
    count = len(calls)
    with pytest.MonkeyPatch.context() as patch:
        assert_same(plain, run_within(lambda: make(patch), profile, mode=mode))
    assert len(calls) == 2 * count > 0


def test_functions_of_an_update_that_the_program_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may look at all parameters of a group."""
    (optimizer,) = make_job(OPTIMIZERS["adamw"]).optimizers
    for owner, name in ((optimizer, "_init_group"), (torch.optim.AdamW, "_init_group"), (adam, "adam")):
        inner = getattr(owner, name)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *args, inner=inner, **options: inner(*args, **options))
            assert not find_groupable([optimizer])
        assert find_groupable([optimizer])


def test_a_scheduler_goes_on_with_the_step_that_it_wrapped(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch does not call a step that the class gets later."""

    def make() -> StateJob:
        job = make_job(OPTIMIZERS["sgd"])
        scheduler = torch.optim.lr_scheduler.StepLR(job.optimizers[0], 2)

        def step(index: int) -> torch.Tensor:
            if index == 2:
                monkeypatch.setattr(torch.optim.SGD, "step", None)
            loss: torch.Tensor = job.step(index)
            scheduler.step()
            return loss

        return dataclasses.replace(job, step=step)

    plain = run_plain(make)
    monkeypatch.setattr(torch.optim.SGD, "step", SGD_STEP)
    assert_same(plain, run_within(make, profile))


def test_wrappers_of_learning_rate_schedulers_leave_updates_in_groups() -> None:
    (optimizer,) = make_job(OPTIMIZERS["adamw"]).optimizers
    for _ in range(2):
        assert find_groupable([optimizer]) == [optimizer]
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    assert not find_groupable([optimizer])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_run_in_slices_beside_what_the_program_holds(name: str, profile: HardwareProfile) -> None:
    """A parameter and its gradient have no room together, though they take less than half of the budget."""
    kept_bytes, side = 1 << 20, 256

    def make() -> StateJob:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, side), torch.nn.Linear(side, side), torch.nn.Linear(side, 8))
        optimizer = OPTIMIZERS[name](model.parameters())

        def step(index: int) -> torch.Tensor:
            loss = model(torch.linspace(-1, 1, 64).reshape(8, 8) * (index + 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    plain, job = make(), make()
    losses = [plain.step(index) for index in range(4)]
    budget_bytes = kept_bytes + 4 * side * side * 3 // 2
    with fit(job, profile, budget_bytes) as room:
        kept = torch.ones(kept_bytes, dtype=torch.uint8)
        for index in range(4):
            with room.step():
                assert torch.equal(job.step(index), losses[index])
                assert not room.was_refused  # else a step without `with` would end at the model's next call
        assert max(each.peak_bytes or 0 for each in room.journal().steps) <= budget_bytes
        assert room.metrics()["sliced_ops"] > 0
        del kept
    assert_same(list_tensors(job), list_tensors(plain))


def test_a_refused_update_of_which_a_part_is_done_is_told(profile: HardwareProfile) -> None:
    """The maximum of amsgrad cannot be cut."""
    side = 512
    model = torch.nn.Sequential(torch.nn.Linear(8, side), torch.nn.Linear(side, side), torch.nn.Linear(side, 8))
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=False)

    def step(_: int) -> None:
        model(torch.ones(8, 8)).square().mean().backward()
        optimizer.step()

    job = StateJob(model, [optimizer], step)
    with fit(job, profile, 19 * 4 * side * side // 10, mode="dynamic") as room:  # noqa: SIM117
        with pytest.raises(Infeasible) as caught, room.step():
            job.step(0)
    assert any("partly, so go on from a checkpoint" in each for each in caught.value.__notes__)


class Momentum(torch.optim.Optimizer):
    """An optimizer of a program's own, of which Elbowroom knows nothing."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=0.1)


def test_an_update_of_an_unknown_optimizer_that_fails_is_told(profile: HardwareProfile) -> None:
    job = make_job(Momentum)
    before = list_tensors(job)
    host_bytes = 5 * PARAMETER_BYTES // 4
    with fit(job, profile, 3 * PARAMETER_BYTES // 2, host_bytes=host_bytes) as room:  # noqa: SIM117
        with pytest.raises((TierFull, Infeasible)) as caught, room.step():
            job.step(0)
    assert any("some parameters may be updated" in each for each in caught.value.__notes__)
    changed = [not torch.equal(each, before[name]) for name, each in job.model.named_parameters()]
    assert any(changed) and not all(changed)


@pytest.mark.parametrize("share", [1.7, 2.15, 2.6])
def test_a_sparse_update_holds_nothing_that_it_does_not_use(share: float, profile: HardwareProfile) -> None:
    def make_sparse() -> StateJob:
        torch.manual_seed(0)
        tables = torch.nn.ModuleList([torch.nn.Embedding(4000, 64, sparse=True) for _ in range(2)])
        optimizer = torch.optim.SparseAdam(tables.parameters())

        def step(index: int) -> None:
            rows = torch.randint(0, 4000, (250,), generator=torch.Generator().manual_seed(index))
            (tables[0](rows) * tables[1](rows)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return StateJob(tables, [optimizer], step)

    plain = run_plain(make_sparse)
    assert_same(run_within(make_sparse, profile, int(share * 4000 * 64 * 4), is_metered=False), plain)
