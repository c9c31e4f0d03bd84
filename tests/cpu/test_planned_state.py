"""Steps whose plan moves model state are carried out as planned, within the budget and with the same results."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elbowroom.errors import Infeasible, TraceError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.room import Room
from elbowroom.runtime.state_tensors import StateTensors
from elbowroom.tracing.residents import Resident, list_kept_tensors, list_residents
from elbowroom.tracing.tracer import UNSEEN_BYTES
from tests.state_jobs import (
    BUDGET,
    PARAMETER_BYTES,
    WIDTH,
    StateJob,
    adamw,
    assert_same,
    fit,
    list_tensors,
    make_batch,
    make_job,
    make_model,
    run_plain,
    run_within,
)

STEPS = 7

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": adamw,
    "adamw foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
}


def make_accumulating_job() -> StateJob:
    """Two backward passes a step, gradients cleared at its beginning and kept between steps."""
    job = make_job(adamw)
    (optimizer,) = job.optimizers
    once = job.step

    def step(index: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        model = job.model
        first = model(torch.full((8, 64), float(index))).square().mean()
        first.backward()
        return once(index)

    return StateJob(job.model, [optimizer], step)


JOBS: dict[str, Any] = {name: functools.partial(make_job, make) for name, make in OPTIMIZERS.items()}
JOBS["accumulation"] = make_accumulating_job


@pytest.mark.parametrize("name", JOBS)
def test_a_plan_that_moves_state_is_followed(name: str, profile: HardwareProfile) -> None:
    make, budget_bytes = JOBS[name], 3 * PARAMETER_BYTES // 2
    plain = run_plain(make, STEPS)
    job = make()
    with fit(job, profile, budget_bytes, mode="auto", min_offload_bytes=1 << 12) as room:
        losses = []
        for index in range(STEPS):
            with room.step():
                losses.append(job.step(index))
        planned, records = room.planned, room.journal().steps
        assert planned is not None and planned.plan.state
        last = records[-1]
        modes = [record.mode for record in records]
        first = modes.index(Mode.PLANNED)  # begins with other state in memory than the plan does
        assert first <= STEPS - 3 and set(modes[first:]) == {Mode.PLANNED}, [record.note for record in records]
        assert set(modes[:first]) == {Mode.CAPTURE}
        assert all((record.peak_bytes or 0) <= budget_bytes for record in records)
        assert last.offloaded_bytes == planned.forecast.offloaded_bytes
        assert last.reloaded_bytes == planned.forecast.reloaded_bytes
        unused_bytes = planned.forecast.peak_bytes - (last.peak_bytes or 0)
        assert 0 <= unused_bytes <= UNSEEN_BYTES + (4 << 10)  # ops were measured while state came and left
    found = list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}
    assert_same(found, plain)


def test_a_step_planned_for_another_budget_is_captured_again(profile: HardwareProfile) -> None:
    """Within another budget the optimizer updates other groups, so that the plan's moves do not fit its ops."""
    make, budget_bytes, steps = JOBS["adamw"], 3 * PARAMETER_BYTES // 2, 14
    plain = run_plain(make, steps)
    job = make()
    with fit(job, profile, 1 << 30, mode="auto", min_offload_bytes=1 << 12) as room:
        losses = []
        for index in range(steps):
            if index == 4:
                assert room.journal().steps[-1].mode is Mode.PLAIN
                room.set_budget(budget_bytes)
            with room.step():
                losses.append(job.step(index))
        planned, records = room.planned, room.journal().steps[4:]
        assert planned is not None and planned.plan.state
        modes = [record.mode for record in records]
        assert modes[:2] == [Mode.PLANNED, Mode.PLANNED] and Mode.CAPTURE in modes and modes[-1] is Mode.PLANNED, modes
        assert records[-1].offloaded_bytes == planned.forecast.offloaded_bytes
        assert all((record.peak_bytes or 0) <= budget_bytes for record in records)
    found = list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}
    assert_same(found, plain)


def test_evaluation_between_steps_leaves_the_next_step_its_plan(profile: HardwareProfile) -> None:
    job = make_job(adamw)
    batch = torch.ones(8, 64)
    with fit(job, profile, 3 * PARAMETER_BYTES // 2, mode="auto", min_offload_bytes=1 << 12) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
            with torch.no_grad():
                seen = job.model(batch)
        assert room.journal().steps[-1].mode is Mode.PLANNED
    with torch.no_grad():
        assert torch.equal(seen, job.model(batch))


def test_state_is_matched_again_where_tensors_were_replaced(profile: HardwareProfile) -> None:
    """`load_state_dict` replaces the optimizer's state."""
    job = make_job(adamw)
    model, optimizers = job.model, job.optimizers
    with fit(job, profile, 3 * PARAMETER_BYTES // 2, mode="auto", min_offload_bytes=1 << 12) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        assert room.planned is not None
        trace = room.planned.trace
    named: list[int] = []

    def find() -> set[int]:
        def name() -> list[Resident]:
            named.append(1)
            return list_residents(model, optimizers)

        return {id(each) for each in tensors.find(list_kept_tensors(model, optimizers), name).values()}

    tensors = StateTensors(trace)
    first = find()
    assert find() == first and len(named) == 1
    optimizers[0].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    second = find()
    assert second <= set(map(id, list_kept_tensors(model, optimizers)))
    assert len(second) == len(first) and second != first and len(named) == 2


@pytest.mark.parametrize(("name", "budget_bytes"), [
    ("adamw foreach", 2 * PARAMETER_BYTES), ("adamw fused", 3 * PARAMETER_BYTES // 2)
])  # fmt: skip
def test_a_step_that_is_planned_ahead_groups_its_optimizer(
    name: str, budget_bytes: int, profile: HardwareProfile
) -> None:
    make = JOBS[name]
    plain = run_plain(make, 4)
    job = make()
    with fit(job, profile, budget_bytes, mode="auto", min_offload_bytes=1 << 12, step=lambda: job.step(0)) as room:
        assert room.planned is not None and room.planned.plan.state  # an op over all parameters would not fit
        losses = []
        for index in range(4):
            with room.step():
                losses.append(job.step(index))
        records = room.journal().steps
        assert all((record.peak_bytes or 0) <= budget_bytes for record in records)
        # Not even the first step drifts, in which the optimizer makes its state.
        assert Mode.DRIFTED not in {record.mode for record in records}, [record.note for record in records]
    assert_same(list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, plain)


SHARING: dict[str, Callable[[nn.Parameter], Any]] = {
    "NumPy": lambda weight: weight.detach().numpy(),
    "a slice of its storage": lambda weight: np.asarray(
        torch.empty(0).set_(weight.untyped_storage()[:], 0, weight.shape).numpy()
    ),
    "another process": lambda weight: weight.share_memory_().detach().numpy(),
}


@pytest.mark.parametrize(
    ("how", "is_before"), [("NumPy", True), ("another process", True), *((how, False) for how in SHARING)]
)
def test_plans_leave_state_that_others_use_where_it_is(how: str, is_before: bool, profile: HardwareProfile) -> None:
    """They see what training does, and it what they write."""

    def train(job: StateJob, room: Room | None) -> list[np.ndarray[Any, Any]]:
        if is_before:
            weights = [each for each in job.model.parameters() if each.ndim > 1]
            views = [SHARING[how](each) for each in weights]
        for index in range(8):
            if index == 4 and not is_before:
                weights = [each for each in job.model.parameters() if each.ndim > 1]
                views = [SHARING[how](each) for each in weights]
            with contextlib.nullcontext() if room is None else room.step():
                job.step(index)
            if index >= 4:
                for each in views:
                    each *= 0.5
        return views

    plain, job = make_job(adamw), make_job(adamw)
    expected = train(plain, None)
    with fit(job, profile, 4 * PARAMETER_BYTES, mode="auto", min_offload_bytes=1 << 12) as room:
        found = train(job, room)
        assert any(record.reloaded_bytes for record in room.journal().steps)
        assert Mode.PLANNED in {record.mode for record in room.journal().steps}
    assert_same(list_tensors(job), list_tensors(plain))
    assert all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("kib", [192, 224, 256])
def test_a_gradient_that_only_some_steps_replace(kib: int, profile: HardwareProfile) -> None:
    """A critic that every other step updates: its gradient lives from one step to the next, and is made at the end."""

    def make() -> StateJob:
        job = make_job(adamw, make_model(6))
        first = job.optimizers[0]
        critic = nn.Linear(WIDTH, WIDTH)
        second = torch.optim.SGD(critic.parameters(), lr=0.1)

        def step(index: int) -> torch.Tensor:
            x = make_batch(index, WIDTH)
            loss = (job.model(x) - x).square().mean()
            first.zero_grad()
            loss.backward()
            first.step()
            if index % 2 == 0:
                loss = (critic(job.model(x).detach()) - x).square().mean()
                second.zero_grad()
                loss.backward()
                second.step()
            return loss.detach()

        return StateJob(nn.ModuleList([job.model, critic]), [first, second], step)

    plain = run_plain(make, 10)
    job = make()
    with fit(job, profile, kib << 10, mode="auto") as room:
        losses = []
        for index in range(10):
            with room.step():
                losses.append(job.step(index))
        records = room.journal().steps
        assert any(record.mode is Mode.PLANNED for record in records)
        assert all((record.peak_bytes or 0) <= kib << 10 for record in records)
    assert_same(list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, plain)


@pytest.mark.parametrize("budget_bytes", [1_600_000, 1_700_000, 1_800_000])
def test_steps_follow_their_plan_after_an_evaluation(budget_bytes: int, profile: HardwareProfile) -> None:
    """The evaluation moves out state that the plan has in memory at a step's beginning."""

    def make() -> StateJob:
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128), nn.LayerNorm(128)) for _ in range(4))
        )
        job = make_job(adamw, model)
        optimizer, batch = job.optimizers[0], torch.randn(16, 128)

        def step(index: int) -> torch.Tensor:
            loss = (model(batch + index) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    plain = run_plain(make, 16)
    job, losses = make(), []
    with fit(job, profile, budget_bytes, mode="auto") as room:
        for index in range(16):
            with room.step():
                losses.append(job.step(index))
            if index % 2:
                with torch.no_grad():
                    job.model(torch.ones(48, 128))
        modes = [record.mode for record in room.journal().steps]
    assert modes[4:] == [Mode.PLANNED] * 12, modes
    assert_same(list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, plain)


@pytest.mark.usefixtures("tolerates_faults")
def test_training_goes_on_after_a_fault_of_the_planner(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise TraceError("no such gap")

    monkeypatch.setattr("elbowroom.step_planner.make_plan", fail)
    assert_same(run_within(functools.partial(make_job, adamw), profile, mode="auto"), run_plain(JOBS["adamw"]))
    assert "please report this: no such gap" in caplog.text


@pytest.mark.usefixtures("tolerates_faults")
def test_another_budget_after_a_fault_of_the_planner(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step runs without a plan then."""

    def fail(*args: object, **options: object) -> None:
        raise TraceError("no such gap")

    plain = run_plain(JOBS["adamw"], 12)
    job, losses = JOBS["adamw"](), []
    with fit(job, profile, 2 * PARAMETER_BYTES, mode="auto") as room:
        for index in range(12):
            if index == 6:
                monkeypatch.setattr("elbowroom.step_planner.make_plan", fail)
                room.set_budget(3 * PARAMETER_BYTES // 2)
            with room.step():
                losses.append(job.step(index))
        records = room.journal().steps[6:]
    assert "please report this: no such gap" in caplog.text
    assert all((record.peak_bytes or 0) <= 3 * PARAMETER_BYTES // 2 for record in records)
    assert_same(list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_smaller_budget_for_a_step_that_updates_all_parameters_at_once(name: str, profile: HardwareProfile) -> None:
    plain = run_plain(JOBS[name], 12)
    job = JOBS[name]()
    with fit(job, profile, 1 << 30, mode="auto") as room:
        losses = []
        for index in range(12):
            if index == 5:
                assert room.metrics()["mode"] == "plain"
                with pytest.raises(Infeasible):
                    room.set_budget(PARAMETER_BYTES // 8)
                room.set_budget(BUDGET)
            with room.step():
                losses.append(job.step(index))
        records = room.journal().steps[5:]
        assert max(record.peak_bytes or 0 for record in records) <= BUDGET
        assert [record.mode for record in records[-3:]] == [Mode.PLANNED] * 3
    assert_same(list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, plain)


class WholeUpdate(torch.optim.Optimizer):
    """An optimizer that nobody can have update some parameters at a time: it sums over all of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [each for group in self.param_groups for each in group["params"]]
        flat = torch.cat([each.grad.flatten() for each in parameters])
        state = self.state[parameters[0]]
        state["mean"] = state.get("mean", torch.zeros_like(flat)).lerp(flat, 0.1)
        for each, part in zip(parameters, state["mean"].split([each.numel() for each in parameters]), strict=True):
            each.sub_(part.view_as(each))


@pytest.mark.parametrize("manages", ["activations", "everything"])
def test_a_budget_that_an_update_cannot_keep_is_refused(manages: str, profile: HardwareProfile) -> None:
    job = make_job(OPTIMIZERS["adamw foreach"] if manages == "activations" else WholeUpdate)
    nbytes = 9 * PARAMETER_BYTES // 2 if manages == "activations" else 2 * PARAMETER_BYTES
    with fit(job, profile, 1 << 30, mode="auto", manages=manages) as room:
        for index in range(4):
            with room.step():
                job.step(index)
        with pytest.raises(Infeasible):
            room.set_budget(nbytes)
        with room.step():
            job.step(4)
        assert room.budget_bytes == 1 << 30
