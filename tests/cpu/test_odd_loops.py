"""Training loops that do unusual things at unusual moments: the same bits, and the budget held.

Each step differs from what was captured in a way that no shape and no count of saves shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom
import elbowroom.step_planner
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode, StepRecord
from elbowroom.planned_step import PlannedStep
from elbowroom.planner.problem import plan

STEPS, WIDTH, ROWS = 8, 24, 256
CHANGES_AT = 5
"""The step from which on a loop does something that no step before it did."""

Step = Callable[["Net", torch.Tensor, int], torch.Tensor]
Outcome = list[tuple[float, list[list[float]]]]


class Net(nn.Module):
    """Three layers, to be put together by a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))


@pytest.fixture(autouse=True)
def always_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that everything fits still runs the strategy."""
    monkeypatch.setattr(elbowroom.step_planner, "keep_all_if_it_fits", lambda *_: None)


def train(
    step: Step, planned: list[PlannedStep | None] | None = None, **options: Any
) -> tuple[Outcome, list[StepRecord]]:
    """The loss of each step and the parameters after it; within a room if there are options.

    `planned`: is given what the room knew in the end.
    """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(STEPS)]
    outcome: Outcome = []

    def whole(index: int) -> None:
        loss = step(model, batches[index], index)
        optimizer.step()
        optimizer.zero_grad()
        # No tensors, since a room counts all that PyTorch's allocator has handed out.
        outcome.append((float(loss), [each.tolist() for each in model.parameters()]))

    if not options:
        for index in range(STEPS):
            whole(index)
        return outcome, []
    options = {
        "memory_budget": 1 << 40,
        "min_offload_bytes": 1,
    } | options
    with elbowroom.fit(model, optimizer, **options) as room:
        for index in range(STEPS):
            with room.step():
                whole(index)
        if planned is not None:
            planned.append(room.planned)
        return outcome, list(room.journal().steps)


def assert_same(one: Outcome, other: Outcome) -> None:
    for index, ((loss, parameters), (other_loss, others)) in enumerate(zip(one, other, strict=True)):
        assert loss == other_loss, f"the loss of step {index}"
        assert parameters == others, f"after step {index}"


def compare(step: Step, profile: HardwareProfile, strategy: str = "recompute_all") -> list[StepRecord]:
    found, records = train(step, profile=profile, strategy=strategy)
    assert_same(train(step)[0], found)
    assert any(record.recomputed or record.offloaded_bytes for record in records if record.mode is Mode.PLANNED)
    return records


def slow(profile: HardwareProfile) -> HardwareProfile:
    """The same machine with a disk on which nothing pays."""
    link = dataclasses.replace(profile.links[0], out_bytes_per_second=1e6, back_bytes_per_second=1e6)
    return dataclasses.replace(profile, links=(link,))


# Writes that only a watcher sees --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_parameter_is_clipped_between_two_backward_passes(how: str, profile: HardwareProfile) -> None:
    """What was dropped would be computed again from it."""

    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        hidden = model.a(x)
        first, second = hidden.mean(), model.b(torch.relu(hidden.detach())).square().mean()
        first.backward()
        if index >= CHANGES_AT:
            with torch.no_grad():
                (model.a.weight if how == "in place" else model.a.weight.data).clamp_(-0.05, 0.05)
        second.backward()
        return second.detach()

    records = compare(step, profile)
    assert records[CHANGES_AT].mode is Mode.DRIFTED and "replay" in records[CHANGES_AT].note


def test_what_a_replay_reads_is_written_after_autograd_has_let_go_of_it(profile: HardwareProfile) -> None:
    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        first = torch.sigmoid(model.b(x)).square().mean()
        a = model.a(x).detach().requires_grad_()
        beside: torch.Tensor | None = (a * a).mean()
        main = torch.tanh(model.c(torch.relu(a.detach() * 1.5))).square().mean()  # its relu is replayed from a
        first.backward()
        if index >= CHANGES_AT:
            beside = None  # nobody needs a any more
            with torch.no_grad():
                a.mul_(0.5)
        main.backward()
        if beside is not None:
            beside.backward()
        return main.detach()

    compare(step, profile)


@pytest.mark.parametrize("strategy", ["offload_all", "recompute_all"])
def test_a_write_through_a_subclass(strategy: str, profile: HardwareProfile) -> None:
    class Mine(torch.Tensor):
        pass

    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        a = torch.sigmoid(model.a(x))
        loss = torch.tanh(model.b(a)).square().mean()
        a.data.as_subclass(Mine).mul_(0.5)
        loss.backward()
        return loss.detach()

    found, _ = train(step, profile=profile, strategy=strategy)
    assert_same(train(step)[0], found)


def test_a_graph_outlives_its_step_and_what_it_was_made_of(profile: HardwareProfile) -> None:
    """After the step nobody watches, so nothing may rest on a replay by then."""

    def loop(room: Any, model: Net, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        found = []
        for index in range(STEPS):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
            late = None
            if room is not None:
                room.__enter__()
            loss = model.b(torch.relu(model.a(x))).square().mean()
            if index >= CHANGES_AT:
                late = loss
            else:
                loss.backward()
            if room is not None:
                room.__exit__(None, None, None)
            if late is not None:
                before = model.a.weight.detach().clone()
                model.a.weight.data.mul_(0.5)
                late.backward()
                model.a.weight.data.copy_(before)
            optimizer.step()
            optimizer.zero_grad()
            found.append(model.a.weight.detach().clone())
        return found

    def make() -> tuple[Net, torch.optim.Optimizer]:
        model = Net()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    class Within:
        """Each `with` is a step of its own."""

        def __init__(self, room: Any) -> None:
            self.room = room

        def __enter__(self) -> None:
            self.step = self.room.step()
            self.step.__enter__()

        def __exit__(self, *exception: Any) -> None:
            self.step.__exit__(*exception)

    expected = loop(None, *make())
    model, optimizer = make()
    with elbowroom.fit(
        model, optimizer, 1 << 40, min_offload_bytes=1, profile=profile, strategy="recompute_all"
    ) as room:
        found = loop(Within(room), model, optimizer)
        assert any(record.recomputed for record in room.journal().steps)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


# Modes ----------------------------------------------------------------------------------------------------------------


class Rounding(TorchDispatchMode):
    """A program's own mode, which changes what an op gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.bfloat16().float() if func is torch.ops.aten.addmm.default else result


def plain_step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
    loss = model.b(torch.tanh(model.a(x))).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("strategy", ["recompute_all", "offload_all"])
@pytest.mark.parametrize("where", ["around the room", "inside the step"])
def test_a_mode_of_the_program(where: str, strategy: str, profile: HardwareProfile) -> None:
    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        with Rounding() if where == "inside the step" else contextlib.nullcontext():
            return plain_step(model, x, index)

    with Rounding() if where == "around the room" else contextlib.nullcontext():
        found, records = train(step, profile=profile, strategy=strategy)
        assert_same(train(step)[0], found)
    is_recomputed = strategy == "recompute_all"
    assert any(record.recomputed for record in records) == is_recomputed
    assert any(record.offloaded_bytes for record in records) or is_recomputed


def test_fake_tensors_inside_the_step(profile: HardwareProfile) -> None:
    """How much memory would that take?"""

    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        if index in (0, CHANGES_AT):
            with FakeTensorMode():
                torch.sigmoid(nn.Linear(64, 64)(torch.randn(32, 64))).sum().backward()
        return plain_step(model, x, index)

    compare(step, profile)


# The budget -----------------------------------------------------------------------------------------------------------


def find_smallest(planned: PlannedStep | None, strategy: str) -> int:
    """The smallest budget for which a strategy has a plan."""
    assert planned is not None
    with pytest.raises(Infeasible) as caught:
        plan(planned.trace, planned.costs, 1, strategy=strategy, min_offload_bytes=1)
    return caught.value.needed_bytes


@pytest.mark.parametrize("strategy", ["auto", "recompute_all", "offload_all"])
def test_autograd_lets_go_of_a_storage_and_saves_it_again(strategy: str, profile: HardwareProfile) -> None:
    """A soft target, detached: the node that saved it first is gone before another saves it."""

    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        y = torch.tanh(model.a(x))
        divergence = functional.kl_div(y.log_softmax(-1), y.softmax(-1).detach(), reduction="batchmean")
        loss = (torch.tanh(model.b(y * divergence)) * 1.5).square().mean()
        loss.backward()
        return loss.detach()

    planned_steps: list[PlannedStep | None] = []
    train(step, planned_steps, profile=profile, strategy=strategy)
    budget = find_smallest(planned_steps[0], strategy)
    found, records = train(step, profile=profile, strategy=strategy, memory_budget=budget)
    assert_same(train(step)[0], found)
    planned = [record.peak_bytes or 0 for record in records if record.mode is Mode.PLANNED]
    assert len(planned) >= STEPS - 3 and 0 < max(planned) <= budget


@pytest.mark.parametrize("layers", [4, 6, 8])
@pytest.mark.parametrize("strategy", ["auto", "recompute_all"])
def test_gradients_die_and_their_addresses_are_used_again(strategy: str, layers: int, profile: HardwareProfile) -> None:
    """An activation that lies where a gradient lay is no gradient."""
    machine = slow(profile)

    def make() -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[int], None]]:
        torch.manual_seed(5)
        parts = [each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        others = [each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        model = nn.ModuleDict({"g": nn.Sequential(*parts), "d": nn.Sequential(*others)})
        makers, judges = (torch.optim.SGD(model[name].parameters(), lr=1e-2) for name in "gd")

        def step(index: int) -> None:
            made = model["g"](torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index)))
            judges.zero_grad()
            makers.zero_grad()
            model["d"](made.detach()).square().mean().backward()
            judges.step()
            judges.zero_grad()
            loss = -model["d"](made).square().mean()
            del made
            loss.backward()
            makers.step()

        return model, [makers, judges], step

    options: dict[str, Any] = {"min_offload_bytes": 1, "profile": machine, "strategy": strategy}
    model, optimizers, step = make()
    with elbowroom.fit(model, optimizers, 1 << 40, **options) as room:
        for index in range(4):
            with room.step():
                step(index)
        budget = find_smallest(room.planned, strategy)
    model, optimizers, step = make()
    with elbowroom.fit(model, optimizers, budget, **options) as room:
        for index in range(10):
            with room.step():
                step(index)
        planned = [record.peak_bytes or 0 for record in room.journal().steps if record.mode is Mode.PLANNED]
    assert len(planned) >= 6 and 0 < max(planned) <= budget


def test_a_fold_planned_ahead(profile: HardwareProfile) -> None:
    """Its workspace must be in the estimate."""

    def step_of(model: Net) -> Callable[[], None]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            hidden = functional.unfold(model.a(torch.ones(ROWS, WIDTH)).view(ROWS, 1, 4, 6), 3, padding=1)
            model.b(torch.tanh(hidden.mean(1))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step.optimizer = optimizer  # type: ignore[attr-defined]
        return step

    options: dict[str, Any] = {"min_offload_bytes": 1, "profile": profile}
    model = Net()
    step = step_of(model)
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, step.optimizer, 1, step=step, **options)  # type: ignore[attr-defined]
    budget = caught.value.needed_bytes
    with elbowroom.fit(model, step.optimizer, budget, step=step, **options) as room:  # type: ignore[attr-defined]
        for _ in range(4):
            with room.step():
                step()
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget


# Forward-mode derivatives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["offload_all", "recompute_all", ""])
def test_forward_mode_derivatives(strategy: str, profile: HardwareProfile) -> None:
    """They are made of tensors of zeros, too, which have a storage with a size and without bytes."""

    def step(model: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x.cos())
            value, tangent = forward_ad.unpack_dual(model.c(torch.tanh(model.b(torch.tanh(model.a(dual))))))
            loss = value.square().mean() + tangent.square().mean()
        loss.backward()
        return loss.detach()

    if strategy:
        records = compare(step, profile, strategy)
        assert not any("failed" in record.note for record in records)
        return
    plain = train(step)[0]
    planned: list[PlannedStep | None] = []
    train(step, planned, profile=profile)
    assert planned[0] is not None
    budget = int(0.8 * planned[0].forecast.peak_bytes)
    found, records = train(step, profile=profile, mode="dynamic", memory_budget=budget)
    assert_same(plain, found)
    assert all(0 < record.peak_bytes <= budget for record in records) and records[0].offloaded_bytes
    assert not any(record.note for record in records)


# What looking leaves behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scheduler", "python", "numpy", "table", "buffer", "counter"])
def test_planning_ahead_leaves_no_trace_in_python(kind: str, profile: HardwareProfile) -> None:
    def losses(ahead: bool) -> list[float]:
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        random.seed(1)
        np.random.seed(1)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
        model.table, model.count, model.tables = None, 0, {}

        def step() -> torch.Tensor:
            y = torch.tanh(model.a(x))
            model.count += 1
            if (kind == "python" and random.random() < 0.5) or (kind == "numpy" and np.random.rand() < 0.5):
                y = torch.tanh(model.b(y))
            if kind == "counter":
                y = y * model.count
            if kind == "table":
                if model.table is None:
                    model.table = model.tables["cosine"] = torch.arange(WIDTH).float().cos()
                y = y * model.tables["cosine"]
            if kind == "buffer":
                if not hasattr(model, "late"):
                    model.register_buffer("late", torch.arange(WIDTH).float().cos())
                y = y * model.late
            loss = y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if kind == "scheduler":
                scheduler.step()
            return loss.detach()

        found = []
        with elbowroom.fit(model, optimizer, 1 << 40, profile=profile, step=step if ahead else None) as room:
            for _ in range(STEPS):
                with room.step():
                    found.append(float(step()))
        return found

    assert losses(ahead=False) == losses(ahead=True)


@pytest.mark.parametrize("strategy", ["recompute_all", "offload_all"])
def test_nested_tensors_and_ops_that_fail(strategy: str, profile: HardwareProfile) -> None:
    """In the step that is captured, too; what nested tensors hold is in the trace."""

    def step(net: Net, x: torch.Tensor, index: int) -> torch.Tensor:
        h = net.a(x).tanh()
        nested = torch.nested.as_nested_tensor([h[:100], h[100:]])
        padded = torch.nested.to_padded_tensor(nested * nested, 0.0)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.mm(h, torch.ones(WIDTH + 1, 2))
        loss = net.b(padded).square().mean() + net.c(h).mean()
        loss.backward()
        return loss.detach()

    known: list[PlannedStep | None] = []
    plain, _ = train(step)
    found, records = train(step, known, profile=profile, strategy=strategy, min_offload_bytes=1)
    assert_same(found, plain)
    assert records[-1].mode is Mode.PLANNED and records[-1].offloaded_bytes + records[-1].recomputed > 0
    trace = known[-1].trace  # type: ignore[union-attr]
    made = [op.writes for op in trace.ops if op.name == "aten._nested_tensor_from_tensor_list.default"]
    assert [[trace.storages[view.storage].nbytes for view in writes] for writes in made] == [[4 * ROWS * WIDTH]]


def test_a_pickled_model_has_no_room(profile: HardwareProfile) -> None:
    """Wherever it comes to lie in memory."""
    for _ in range(20):
        models = [nn.Linear(2, 2) for _ in range(5)]
        pickles = []
        for model in models:
            with elbowroom.fit(model, torch.optim.SGD(model.parameters()), 1 << 40, profile=profile):
                pickles.append(pickle.dumps(model))
        del model, models
        for model in [pickle.loads(each) for each in pickles]:
            elbowroom.fit(model, torch.optim.SGD(model.parameters()), 1 << 40, profile=profile).detach()
        del model
