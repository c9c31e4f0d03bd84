"""Each known trap of standing between autograd and its tensors, in every way that Elbowroom has of running a step.

A trap is a training loop. It runs plainly, and then within a room in each of these ways; all it produced must be equal
to the last bit. Storages are tiny here, so the smallest ones may move too, and plans are forced.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import logging
import os
import pathlib
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elbowroom
import elbowroom.runtime.transfers
import elbowroom.step_planner
from elbowroom.errors import TierFull, TransferFailed, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.problem import pose
from elbowroom.room import Room
from tests.pressure import ask_at_every_request

STEPS = 6
"""The first three are captured; the others follow the plan, if no trap keeps them from it."""

WAYS = ("offload_all", "recompute_all", "smallest", "pressed")
"""The ways that plan begin with captured steps, in which everything leaves. A few tests capture all their steps."""

HUGE = 1 << 40

MODES = {"capture": Mode.CAPTURE, "pressed": Mode.DYNAMIC}
"""Of the ways that plan nothing."""

Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]
Step = Callable[[int], Any]
Made = tuple[nn.Module, Optimizers, Step]

PLAIN: dict[str, Any] = {}
"""What each case comes to without a room. It repeats itself to the last bit, or the ways could not be compared."""


class Runner:
    """Runs loops in a room in one of the ways."""

    def __init__(self, way: str, case: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
        """`case`: the test with its parameters. Its plain run is the same for all ways."""
        self.way, self.case, self.profile = way, case, profile
        if way.endswith("_all"):
            # A budget that everything fits is the only one at which both strategies always have a plan.
            monkeypatch.setattr(elbowroom.step_planner, "keep_all_if_it_fits", lambda *_: None)
        elif way == "pressed":
            ask_at_every_request(monkeypatch)
        monkeypatch.setattr("elbowroom.plain_step_check.AMPLE", 1 << 40)  # watched, though a larger step would fit
        monkeypatch.setattr("elbowroom.plan_cache.GAIN", 1e9)  # planned at once
        self._budget = HUGE

    def fit(self, model: nn.Module, optimizers: Optimizers, **options: Any) -> Room:
        options = {"min_offload_bytes": 1, "profile": self.profile} | options
        if self.way == "pressed":
            options |= {"mode": "dynamic", "policy": "dtr"}
        strategy = self.way if self.way.endswith("_all") else "auto:effort=0.02"  # any plan will do
        settling = 10**6 if self.way == "capture" else 3
        room = elbowroom.fit(model, optimizers, self._budget, strategy=strategy, settling_steps=settling, **options)
        if self.way == "capture":
            room._modes.captured.adopt = lambda *_, **__: None  # type: ignore[method-assign]
        return room

    def find_smallest(self, make: Callable[[], Made], steps: int = STEPS) -> None:
        """Let later rooms have the smallest budget that works."""
        self._budget = HUGE
        model, optimizers, step = make()
        with self.fit(model, optimizers) as room:
            for index in range(steps):
                with room.step():
                    step(index)
                if room.planned is not None:
                    break
        assert room.planned is not None
        self._budget = pose(room.planned.trace, room.planned.costs, 1, min_offload_bytes=1).floor.peak_bytes

    def add_room(self, share: float) -> None:
        """What no plan foresaw needs room of its own, and what an op takes inside itself is known by a bound only."""
        self._budget += int(share * self._budget)

    def compare(
        self,
        make: Callable[[], Made],
        *,
        steps: int = STEPS,
        drifts: bool = False,
        settles: int = 3,
        more: float = 0.0,
        **options: Any,
    ) -> Room:
        """Run `make`'s loop plainly and in a room, and compare everything. Returns the (detached) room."""
        expected = PLAIN.get(self.case)
        if expected is None:
            expected = collect(make(), None, steps)
            PLAIN[self.case] = expected
        if self.way == "smallest":
            self.find_smallest(make)
            self.add_room(3 / 4 if drifts else more)
        model, optimizers, _step = made = make()
        with self.fit(model, optimizers, **options) as room:
            found = collect(made, room, steps)
        assert_same(expected, found)
        records = room.journal().steps
        assert sum(record.offloaded_bytes + record.recomputed for record in records) > 0, "nothing was moved"
        if not drifts:
            wanted = MODES.get(self.way, Mode.PLANNED)
            if self.way == "smallest" and room.planned is not None and not room.planned.plan.decisions:
                wanted = Mode.PLAIN  # its peak lies where nothing can leave: the smallest budget is the plain peak
            assert {record.mode for record in records[settles:]} == {wanted}, [(r.mode, r.note) for r in records]
            if self.way == "smallest":
                assert max(record.peak_bytes or 0 for record in records[settles:]) <= room.budget_bytes
            if self.way == "recompute_all":
                assert records[-1].recomputed > 0, "nothing was recomputed"
        return room


def collect(made: Made, room: Room | None, steps: int) -> dict[str, Any]:
    """Run a loop; all that it produced."""
    model, optimizers, step = made
    produced = []
    for index in range(steps):
        with room.step() if room is not None else contextlib.nullcontext():
            result = step(index)
        produced.append(copy_values(result))
    return {
        "produced": produced,
        "state": copy_values(model.state_dict()),
        "gradients": copy_values([parameter.grad for parameter in model.parameters()]),
        "optimizers": copy_values([each.state_dict() for each in as_list(optimizers)]),
        "random": torch.get_rng_state(),
    }


def as_list(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def copy_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            return value.detach().clone()
        # Not in memory of PyTorch's allocator, which a room counts.
        memory = torch.frombuffer(bytearray(value.numel() * value.element_size() or 1), dtype=torch.uint8)
        copy = torch.empty(0, dtype=value.dtype).set_(memory.untyped_storage(), 0, value.shape)
        return copy.copy_(value.detach())
    if isinstance(value, dict):
        return {key: copy_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy_values(item) for item in value]
    return value


def assert_same(expected: Any, found: Any, place: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        expected, found = (each.to_dense() if each.is_sparse else each for each in (expected, found))
        assert expected.dtype == found.dtype and expected.shape == found.shape, place
        same = torch.equal(expected, found) or (
            bool((expected.isnan() == found.isnan()).all()) and torch.equal(expected.nan_to_num(), found.nan_to_num())
        )
        assert same, f"{place}: {expected.flatten()[:4]} became {found.flatten()[:4]}"
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys(), place
        for key in expected:
            assert_same(expected[key], found[key], f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(expected) == len(found), place
        for index, pair in enumerate(zip(expected, found, strict=True)):
            assert_same(*pair, f"{place}[{index}]")
    else:
        assert expected == found, place


@pytest.fixture(params=WAYS)
def runner(request: pytest.FixtureRequest, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(request.param, request.node.name.replace(request.param, ""), profile, monkeypatch)


@pytest.fixture
def forced(
    request: pytest.FixtureRequest, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Runner]:
    return lambda way: Runner(way, request.node.name, profile, monkeypatch)


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """A test that waits for ever fails instead."""

    def stop(*_: Any) -> None:
        raise TimeoutError("the test waits for ever")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(120)  # the first to plan compiles the planner, on a machine that others use
    try:
        yield
    finally:
        signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# Loops ----------------------------------------------------------------------------------------------------------------

WIDTH, ROWS = 24, 256
"""Activations outweigh parameters, so that a budget has something to move."""


class Layers(nn.Module):
    """Some layers whose activations can be moved and replayed. `middle` is what a trap puts between them."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor] | None = None, layers: int = 3) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.relu(layer(x) * 1.5)
        if self.middle is not None:
            x = self.middle(x)
        for layer in self.after:
            x = torch.tanh(layer(x) + 0.5)
        return x


def batch(index: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(rows, WIDTH, generator=generator)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With state as Adam has, and a fifth of its ops, which would be most of a step here."""
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def loop(
    model: Callable[[], nn.Module] = Layers,
    loss: Callable[[nn.Module, int], torch.Tensor] = lambda model, index: model(batch(index)).square().mean(),
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
) -> Callable[[], Made]:
    """A loop that differs from the usual one in its model or its loss."""

    def make() -> Made:
        torch.manual_seed(5)
        random.seed(5)
        made = model()
        made_optimizer = optimizer(made)

        def step(index: int) -> torch.Tensor:
            value = loss(made, index)
            value.backward()
            made_optimizer.step()
            # The gradients of the last step are compared.
            made_optimizer.zero_grad(set_to_none=index < STEPS - 1) if index < STEPS - 1 else None
            return value.detach()

        return made, made_optimizer, step

    return make


def press() -> None:
    """An op before which all that may leave leaves, where steps are pressed."""
    torch.ones(3) + 1


@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_the_usual_loop(runner: Runner, optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    runner.compare(loop(optimizer=optimizer))


def test_the_comparison_sees_a_changed_bit() -> None:
    first, second = (collect(loop()(), None, 2) for _ in range(2))
    assert_same(first, second)
    second["produced"][1] += 1e-7
    with pytest.raises(AssertionError, match="produced"):
        assert_same(first, second)


# Versions -------------------------------------------------------------------------------------------------------------


def spoiled(kind: str, position: int) -> Callable[[nn.Module, int], torch.Tensor]:
    """A loss whose backward must fail: something saved is modified in place."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        saved: list[torch.Tensor] = []
        x = batch(index)
        for layer in model.before:
            x = torch.sigmoid(layer(x))
            saved.append(x)
        conjugate = torch.complex(x, x).conj()
        sparse = x.detach().to_sparse().requires_grad_(False)
        product = (conjugate * torch.complex(x, x * 2)).abs().sum() + torch.sparse.mm(sparse.t(), x).sum()
        if index == STEPS - 2:
            with torch.no_grad():
                if kind == "plain":
                    saved[position].add_(1.0)
                elif kind == "view":
                    saved[position][:2].zero_()
                elif kind == "parameter":
                    model.before[position].weight.mul_(2.0)
                elif kind == "conjugate":
                    conjugate.mul_(2.0)
        return x.square().mean() + product * 1e-3

    return loss


@pytest.mark.parametrize(
    ("kind", "position"), [("plain", 0), ("plain", 1), ("plain", 2), ("view", 1), ("parameter", 1), ("conjugate", 0)]
)
def test_what_was_saved_may_not_be_modified(runner: Runner, kind: str, position: int) -> None:
    def make() -> Made:
        model, optimizer, step = loop(loss=spoiled(kind, position))()

        def careful(index: int) -> Any:
            try:
                return step(index)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
                optimizer.zero_grad()
                return "refused"

        return model, optimizer, careful

    assert collect(make(), None, STEPS)["produced"][-2] == "refused"
    runner.compare(make, drifts=True)


def test_detached_data_may_be_modified(runner: Runner) -> None:
    """Writes through `x.data` are not counted by autograd, whose backward then sees what was written."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.sigmoid(model.before[0](batch(index)))
        y = torch.sigmoid(model.before[1](x))
        x.data.mul_(0.5)
        y.data.add_(0.25)
        return model.before[2](y).square().mean()

    runner.compare(loop(loss=loss))


def test_data_modified_between_two_needs(runner: Runner) -> None:
    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> list[torch.Tensor]:
            x = torch.sigmoid(model.before[0](batch(index)))
            held = x.detach().requires_grad_()
            first, second = model.before[1](held).square().mean(), model.before[2](held).square().mean()
            first.backward()
            held.data.mul_(3.0)
            second.backward()
            x.backward(held.grad)
            optimizer.step()
            optimizer.zero_grad()
            return [first.detach(), second.detach(), held.detach()]

        return model, optimizer, step

    runner.compare(make, more=0.1)  # the captured step cannot tell what it will never need again


@pytest.mark.parametrize("target", ["kept leaf", "offloaded"])
def test_data_modified_in_some_steps_only(runner: Runner, target: str) -> None:
    """No trace says so beforehand."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.sigmoid(model.before[0](batch(index)))
        y = torch.relu(x + model.before[1].bias)
        value = (y * y).mean() + model.before[2](y).square().mean()
        if index >= STEPS - 2:
            if target == "kept leaf":
                model.before[1].bias.data.mul_(100.0)
            else:
                y.data.mul_(2.0)
        return value

    runner.compare(loop(loss=loss), drifts=True)


# Hooks ----------------------------------------------------------------------------------------------------------------


def scaled_hooks() -> saved_tensors_hooks:
    """Hooks whose work shows in the gradients."""
    return saved_tensors_hooks(lambda tensor: tensor * 2.0, lambda tensor: tensor * 0.25)


def test_hooks_of_the_user_inside_are_the_only_ones_that_run(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.sigmoid(model.before[0](batch(index)))
        with scaled_hooks():
            x = torch.sigmoid(model.before[1](x))
        return model.before[2](x).square().mean()

    runner.compare(loop(loss=loss))


def test_hooks_of_the_user_outside_run_as_without_a_room(profile: HardwareProfile) -> None:
    seen: dict[bool, int] = {}
    results = []
    for is_plain in (True, False):
        seen[is_plain] = 0

        def pack(tensor: torch.Tensor, is_plain: bool = is_plain) -> torch.Tensor:
            seen[is_plain] += 1
            return tensor

        made = loop()()
        with (
            elbowroom.fit(*made[:2], HUGE, profile=profile) as room,
            saved_tensors_hooks(pack, lambda tensor: 2 * tensor),
        ):
            results.append(collect(made, None if is_plain else room, STEPS))
    assert_same(*results)
    assert seen[True] == seen[False] > 0
    assert "saved-tensor hooks of the program" in room.journal().steps[0].note


def test_hooks_that_move_to_the_cpu(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.sigmoid(model.before[0](batch(index)))
        with torch.autograd.graph.save_on_cpu():
            x = torch.sigmoid(model.before[1](x))
        return model.before[2](x).square().mean()

    runner.compare(loop(loss=loss))


# Orders of backward ---------------------------------------------------------------------------------------------------


def test_backward_twice(runner: Runner) -> None:
    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            value = model(batch(index)).square().mean()
            value.backward(retain_graph=True)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    runner.compare(make)


def test_backward_twice_in_one_step_only(runner: Runner) -> None:
    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            value = model(batch(index)).square().mean()
            if index == STEPS - 2:
                value.backward(retain_graph=True)
                value.backward(retain_graph=True)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    runner.compare(make, drifts=True)


def test_parts_of_the_graph_in_any_order(runner: Runner) -> None:
    """Unpacking follows what is asked for, which changes from step to step."""

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> list[torch.Tensor]:
            trunk = torch.sigmoid(model.before[0](batch(index)))
            heads = [torch.sigmoid(layer(trunk)).square().mean() for layer in (*model.before[1:], *model.after)]
            order = list(range(len(heads)))
            if index > STEPS - 3:
                random.Random(index).shuffle(order)
            for head in order:
                heads[head].backward(retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
            return [head.detach() for head in heads]

        return model, optimizer, step

    runner.compare(make, drifts=True)


def test_autograd_grad(runner: Runner) -> None:
    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            value = model(batch(index)).square().mean()
            parameters = list(model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    runner.compare(make)


def test_a_gradient_of_some_inputs_only(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = batch(index).requires_grad_()
        value = model(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, retain_graph=True)
        return value + gradient.detach().square().sum()

    runner.compare(loop(loss=loss))


def test_double_backward(runner: Runner) -> None:
    """A gradient penalty: the graph of the gradient saves what was brought back."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = batch(index).requires_grad_()
        value = model(x).square().mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + (gradient.norm(dim=1) - 1.0).square().mean()

    runner.compare(loop(loss=loss))


def test_double_backward_of_the_parameters(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        value = model(batch(index)).square().mean()
        gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        return value + sum(gradient.square().sum() for gradient in gradients)

    runner.compare(loop(loss=loss))


def test_double_backward_of_a_graph_that_outlives_the_update(runner: Runner) -> None:
    """The update writes to what replays read, which read in turn what autograd has let go of."""

    def make() -> Made:
        torch.manual_seed(5)
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        optimizer = sgd(model)

        def step(index: int) -> Any:
            x = batch(index).requires_grad_()
            value = model(x)
            (gradient,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            loss = gradient.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return model, optimizer, step

    runner.compare(make)


def test_several_forwards_before_one_backward(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        return torch.stack([model(batch(3 * index + part)).square().mean() for part in range(3)]).sum()

    runner.compare(loop(loss=loss))


def test_gradient_accumulation(runner: Runner) -> None:
    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)
        fixed = batch(0)

        def step(index: int) -> list[torch.Tensor]:
            values = []
            for part in range(3):
                value = (
                    model(batch(3 * index + part)) * torch.sigmoid(fixed * model.before[0].bias)
                ).square().mean() / 3
                value.backward()
                values.append(value.detach())
            optimizer.step()
            optimizer.zero_grad()
            return values

        return model, optimizer, step

    runner.compare(make)


def test_gradient_accumulation_over_rooms_steps(runner: Runner) -> None:
    """The optimizer steps after every second `with`."""

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            value = model(batch(index)).square().mean()
            value.backward()
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    runner.compare(make, drifts=True)


def test_two_optimizers(runner: Runner) -> None:
    """Two players: the second one's loss is taken after the first one's parameters have changed."""

    def make() -> Made:
        torch.manual_seed(5)
        model = nn.ModuleDict({"one": Layers(layers=2), "two": Layers(layers=2)})
        optimizers = [torch.optim.Adam(model[name].parameters(), lr=1e-2) for name in ("one", "two")]

        def step(index: int) -> list[torch.Tensor]:
            made = model["one"](batch(index))
            first = model["two"](made.detach()).square().mean()
            first.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            second = -model["two"](made).square().mean()
            second.backward()
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            return [first.detach(), second.detach()]

        return model, optimizers, step

    runner.compare(make)


def test_a_parameter_changes_between_forward_and_backward(runner: Runner) -> None:
    """That is allowed if autograd has not saved it, so a replay must not read it later."""

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            x = torch.sigmoid(model.before[0](batch(index)))
            y = torch.tanh(x + model.before[1].bias)
            value = (y * y * y).mean() + model.before[2](y).square().mean()
            if index >= STEPS - 2:
                with torch.no_grad():
                    model.before[1].bias.mul_(2.0)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    runner.compare(make, drifts=True)


def test_parameters_are_given_other_contents_between_forward_and_backward(runner: Runner) -> None:
    """Averaged or quantised weights are put in place like this. Autograd finds them in what it saved of a parameter
    itself, and not in a view of one (the weights of a Linear are transposed), nor may a replay."""

    def middle() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.PReLU(WIDTH), nn.Unflatten(0, (-1, 4)), nn.Conv1d(4, 4, 3))

    def swap(model: nn.Module, index: int) -> torch.Tensor:
        value: torch.Tensor = model(batch(index)).square().mean()
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.25
        return value

    def make_model() -> nn.Module:
        return Layers(nn.Sequential(middle(), nn.ZeroPad1d(1), nn.Flatten(0, 1)))

    runner.compare(loop(make_model, swap))


# What is saved --------------------------------------------------------------------------------------------------------

Middle = Callable[[torch.Tensor], torch.Tensor]


class Saves(torch.autograd.Function):
    """Saves its input, its output, an intermediate and a tensor of another type; reads them twice."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        intermediate = x.exp()
        output = intermediate * factor
        signs = x > 0
        context.save_for_backward(x, output, intermediate, signs, None)
        context.mark_non_differentiable(signs)
        return output, signs

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, output, intermediate, signs, nothing = context.saved_tensors
        again = context.saved_tensors
        assert nothing is None and all(torch.equal(one, other) for one, other in zip(again, (x, output), strict=False))
        return gradient * output * signs + x * 1e-3, (gradient * intermediate).sum().reshape(())


class ModifiesInput(torch.autograd.Function):
    """Works in place, and says so."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0).tanh_()
        context.mark_dirty(x)
        context.save_for_backward(x)
        return x

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (output,) = context.saved_tensors
        return gradient * (1 - output * output) * 2.0


def expanded(x: torch.Tensor) -> torch.Tensor:
    wide = x.mean(dim=0, keepdim=True).sigmoid().expand_as(x)
    return x * wide * wide.sin()


def transposed(x: torch.Tensor) -> torch.Tensor:
    y = torch.sigmoid(x).t()
    z = y[::2, 1::3].sigmoid() * y[1::2, ::3][:, : y[::2, 1::3].shape[1]]
    return x * y.t() + z.sum() + y.t()[:, 3:5].prod()


def windows(x: torch.Tensor) -> torch.Tensor:
    """Overlapping views."""
    y = x.sigmoid()
    return x * y + y.unfold(1, 5, 2).square().mean()


def views_of_one(x: torch.Tensor) -> torch.Tensor:
    both = torch.sigmoid(torch.cat((x, x * 2), dim=1))
    left, right = both.chunk(2, dim=1)
    return left * right + left.exp() * right.sin() + both[:, ::2] * both[:, 1::2]


def other_types(x: torch.Tensor) -> torch.Tensor:
    """One storage, saved as real, as complex and as integers."""
    y = torch.sigmoid(x)
    pairs = torch.view_as_complex(y.reshape(*x.shape[:-1], -1, 2))
    bits = y.detach().view(torch.int32)
    chosen = torch.gather(y, 1, (bits & 7).long())
    return y * y + chosen * torch.view_as_real(pairs * pairs).reshape_as(y)


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    y = torch.fft.fft(x)
    z = y.conj() * torch.complex(x, x.sin())
    return x + (z.imag * z.real.exp().clamp(max=3.0)) * 1e-2 + torch.resolve_conj(z.conj()).abs() * 1e-2


def lazy_bits(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x.sigmoid(), x.tanh()).conj()
    return x * z.imag.sin() + torch.view_as_real(torch.resolve_conj(z * z)).sum(-1)


def sparse(x: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(x.shape[0]).to_sparse()
    rows = torch.eye(x.shape[0]).to_sparse_csr()
    return torch.sparse.mm(eye, x.sigmoid()) * (rows @ x).sin()


def nothing_at_all(x: torch.Tensor) -> torch.Tensor:
    """Tensors without elements, and without dimensions."""
    scalar = x.sum().sigmoid()
    return x * scalar * scalar.sin() + (x[:0].sigmoid() * x[:0]).sum()


def integers(x: torch.Tensor) -> torch.Tensor:
    order = x.detach().argsort(dim=1)
    return torch.gather(x, 1, order).sigmoid()[:, order[0]] * x.index_select(0, order[:, 0] % x.shape[0])


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2.0
    y.sigmoid_()
    z = y * 1.5
    z.add_(x.exp())
    y = z * 1.25
    y[:, ::2].add_(1.0)
    y[0] = x[1] * 3.0
    return functional.relu(y, inplace=True).tanh()


def filled(x: torch.Tensor) -> torch.Tensor:
    """A block made empty and filled piece by piece."""
    y = torch.empty_like(x)
    for row in range(0, x.shape[0], 16):
        y[row : row + 16] = x[row : row + 16] * (row + 1)
    return y.sigmoid() * x


def many_at_once(x: torch.Tensor) -> torch.Tensor:
    """Ops that write in place and return nothing."""
    y = torch.zeros_like(x)
    with torch.no_grad():
        torch._foreach_add_([y], [x.detach()])
        torch._foreach_mul_([y], 0.5)
    return torch.tanh(y + x) * y.cos()


def written_results(x: torch.Tensor) -> torch.Tensor:
    """Ops that write to a tensor they are given."""
    with torch.no_grad():
        factor = torch.empty(0)
        torch.sin(x.detach(), out=factor)
        other = torch.empty_like(x)
        torch.mul(factor, 2.0, out=other)
    return x * factor + torch.tanh(x + other)


def dropped_out(x: torch.Tensor) -> torch.Tensor:
    y = functional.dropout(x, 0.3)
    y = torch.relu(y * 1.5) + torch.rand_like(y) * y
    return functional.rrelu(y, training=True) + functional.dropout1d(y[:, :, None], 0.5)[:, :, 0]


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.reshape(1, 2, -1, WIDTH // 2)
    return functional.scaled_dot_product_attention(heads, heads * 0.5, heads.sin(), dropout_p=0.2).reshape_as(x)


def custom(x: torch.Tensor) -> torch.Tensor:
    output, signs = Saves.apply(x.sigmoid(), torch.tensor(0.5, requires_grad=True))
    return output * signs + ModifiesInput.apply(x * 0.5)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: functional.dropout(torch.tanh(torch.sigmoid(y) * y), 0.2), x, use_reentrant=False)


def checkpointed_reentrant(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: functional.dropout(torch.tanh(torch.sigmoid(y) * y), 0.2), x, use_reentrant=True)


def evaluated_inside(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        before = torch.sigmoid(x).square().mean()
    with torch.inference_mode():
        y = torch.relu(torch.ones(4, 4) * 3).sum()
    return torch.sigmoid(x) * before * float(y)


def tied_in_a_knot(x: torch.Tensor) -> torch.Tensor:
    """A view is the last to hold its storage."""
    y = torch.sigmoid(x).reshape(-1)[5:-7]
    z = y[3:]
    del y
    return x * (z * z.sin()).sum()


def same_everywhere(x: torch.Tensor) -> torch.Tensor:
    y = x.sigmoid()
    return y * y + y.sin() * y.exp() + y @ (y.t() @ y)


def logged(x: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: gradient * 1.25)
    return torch.sigmoid(x).clamp(min=0.25) * x


@pytest.mark.parametrize(
    "middle",
    [
        expanded, transposed, windows, views_of_one, other_types, complex_numbers, lazy_bits, sparse, nothing_at_all,
        integers, in_place, filled, many_at_once, written_results, dropped_out, attention, custom, checkpointed,
        checkpointed_reentrant, evaluated_inside, tied_in_a_knot, same_everywhere, logged,
    ],
    ids=lambda middle: middle.__name__,
)  # fmt: skip
def test_whatever_is_saved(runner: Runner, middle: Middle) -> None:
    runner.compare(loop(lambda: Layers(middle)))


class Recurrent(nn.Module):
    """An LSTM, whose oneDNN kernel makes its workspace only where gradients are recorded, and hands out empty strides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.lstm = Layers(layers=2), nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, (last, _) = self.lstm(self.layers(x).view(16, -1, WIDTH))
        return found.reshape(-1, WIDTH).sin() + last.mean()


def test_a_recurrent_kernel(runner: Runner) -> None:
    runner.compare(loop(Recurrent))


class Convolutions(nn.Module):
    """Convolutions, in a forward pass under settings of its own."""

    def __init__(self, settings: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.layers, self.settings = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)), settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 3, 16, 16)
        with self.settings():
            for layer in self.layers:
                x = torch.sin(layer(x).sigmoid() + x @ x.transpose(-1, -2))
        return x


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def without_onednn() -> contextlib.AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


@pytest.mark.parametrize("settings", [without_onednn, other_threads, deterministic, torch.no_grad])
def test_settings_of_the_forward_pass_alone(
    runner: Runner, settings: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    """A replay runs under them, and leaves those of the backward pass as they are."""
    seen: list[Any] = []

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            is_fixed, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
            seen.append((torch.is_grad_enabled(), threads, is_fixed, torch.backends.mkldnn.enabled))
            return gradient

    def model() -> nn.Module:
        return nn.Sequential(Layers(layers=1), Convolutions(settings), Convolutions(contextlib.nullcontext))

    def loss(made: nn.Module, index: int) -> torch.Tensor:
        first, second, third = made  # type: ignore[misc]
        x = Sees.apply(first(batch(index, rows=4 * ROWS)))
        return Sees.apply(third(second(x))).square().mean()

    runner.compare(loop(model, loss))
    assert len(set(seen)) == 1


class Tied(nn.Module):
    """One parameter used as it is, transposed, viewed and shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.two(torch.tanh(self.one(x))))
        weight = self.one.weight
        x = x @ weight.t() + x @ weight.view(-1).reshape(WIDTH, WIDTH).sigmoid()
        return torch.tanh(x * weight[0]) * self.one.bias.exp() * weight[:, 1]


def test_parameters_tied_and_viewed(runner: Runner) -> None:
    runner.compare(loop(Tied))


def test_a_subclass_of_tensor_stays_one(runner: Runner) -> None:
    class Marked(torch.Tensor):
        pass

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x, marked)
            return x * marked.as_subclass(torch.Tensor)

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            _, marked = context.saved_tensors
            kind = 2.0 if isinstance(marked, Marked) else 3.0
            return gradient * marked.as_subclass(torch.Tensor) * kind, None

    def middle(x: torch.Tensor) -> torch.Tensor:
        return Sees.apply(x, x.detach().sigmoid().as_subclass(Marked))

    runner.compare(loop(lambda: Layers(middle)))


def test_addresses_are_reused(runner: Runner) -> None:
    """Blocks die and others are born at their addresses, within steps and between them."""

    def middle(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            y = x * 2.0
            x = y.tanh()
            del y
            x = torch.sigmoid(x + 0.1)
        gc.collect(0)
        return x

    runner.compare(loop(lambda: Layers(middle)))


def test_graphs_that_wait_for_the_garbage_collector(runner: Runner) -> None:
    """Handles then die at any moment, in the middle of a move too."""

    def make() -> Made:
        model, optimizer, step = loop()()

        def knotted(index: int) -> Any:
            unused = torch.sigmoid(model(batch(index))) * 2.0
            knot: list[Any] = [unused]
            knot.append(knot)
            del unused, knot
            return step(index)

        return model, optimizer, knotted

    before = gc.get_threshold()
    gc.set_threshold(1, 2, 2)
    try:
        runner.compare(make, drifts=True, steps=STEPS)
    finally:
        gc.set_threshold(*before)


# Ops with state -------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Batch norms of all kinds; the replay of one must not count its batch again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(6, 6, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(
            [
                nn.BatchNorm1d(6),
                nn.BatchNorm1d(6, momentum=None),
                nn.BatchNorm1d(6, track_running_stats=False),
                nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
            ]
        )
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, 6, 4)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)) * 1.5) + x
        return self.spectral(x).sigmoid()


def test_batch_norm(runner: Runner) -> None:
    runner.compare(loop(Norms))


class ReadsStatistics(Layers):
    """Computes from running statistics, which the forward pass then updates: no op says that it writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = torch.sigmoid(layer(x) - self.norm.running_mean)
            x = torch.relu(self.norm(x) + x)
        return x


def test_statistics_that_are_read_and_updated(runner: Runner) -> None:
    runner.compare(loop(ReadsStatistics), drifts=True)


def test_batch_norm_that_only_evaluates(runner: Runner) -> None:
    def model() -> nn.Module:
        made = Norms()
        with torch.no_grad():
            made(batch(77))
        return made.eval()

    runner.compare(loop(model))


def test_batch_norm_that_changes_its_mind(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        model.train(index != STEPS - 2)
        return model(batch(index)).square().mean()

    runner.compare(loop(Norms, loss), drifts=True)


def test_evaluation_between_steps(runner: Runner) -> None:
    def make() -> Made:
        model, optimizer, step = loop(Norms)()
        return model, optimizer, step

    expected_made = make()
    expected = []
    for index in range(STEPS):
        expected.append(expected_made[2](index))
        with torch.no_grad():
            expected.append(expected_made[0].eval()(batch(index + 50)))
        expected_made[0].train()
    model, optimizer, step = make()
    with runner.fit(model, optimizer) as room:
        for index in range(STEPS):
            with room.step():
                assert_same(expected[2 * index], step(index))
            with torch.no_grad():
                assert_same(expected[2 * index + 1], model.eval()(batch(index + 50)))
            model.train()
    assert_same(copy_values(expected_made[0].state_dict()), copy_values(model.state_dict()))


# Steps that change ----------------------------------------------------------------------------------------------------


def test_a_number_that_changes_every_step(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        alpha = 0.5 + 0.37 * index
        x = torch.relu(model.before[0](batch(index)) * alpha)
        x = torch.tanh(torch.clamp(x, max=2.0 * alpha) + alpha)
        x = functional.leaky_relu(model.before[1](x) * alpha, negative_slope=alpha * 0.1)
        x = torch.tanh(x.mul(torch.tensor(alpha)).add(x, alpha=alpha))
        return model.before[2](x).square().mean() * alpha

    runner.compare(loop(loss=loss))


def test_one_of_two_equal_layers_at_random(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = torch.relu(model.before[0](batch(index)) * 1.5)
        x = torch.relu(random.choice(list(model.after))(x) * 1.25)
        x = torch.relu(random.choice(list(model.after))(x) * 0.75)
        return model.before[2](x).square().mean()

    runner.compare(loop(loss=loss), drifts=True)


def test_one_of_two_equal_activations_at_random(runner: Runner) -> None:
    """Nothing that autograd saves shows the difference; only what a replay reads does."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = batch(index)
        pair = [torch.tanh(layer(x)) for layer in model.before[:2]]
        chosen, other = pair if random.random() < 0.5 else reversed(pair)
        y = torch.relu(chosen + model.before[2].bias)
        z = torch.relu(other * 3.0 + model.before[2].bias)
        return (model.after[0](y) * z).square().mean() + sum(each.square().mean() for each in pair)

    runner.compare(loop(loss=loss), steps=12, drifts=True)


@pytest.mark.parametrize("kind", ["rows", "fewer ops", "more ops", "order", "no backward", "empty"])
def test_a_step_that_leaves_its_trace(runner: Runner, kind: str) -> None:
    """Then back to the usual ones."""

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers(layers=4)
        optimizer = sgd(model)

        def step(index: int) -> Any:
            odd = index in (4, 6, 7)
            layers = [*model.before, *model.after]
            x = batch(index, 2 * ROWS if odd and kind == "rows" else ROWS)
            if odd and kind == "empty":
                return "nothing"
            if odd and kind == "fewer ops":
                layers = layers[:3]
            elif odd and kind == "more ops":
                layers = layers * 2
            elif odd and kind == "order":
                layers = layers[::-1]
            for position, layer in enumerate(layers):
                x = (
                    torch.relu(layer(x) * 1.5)
                    if (layer is model.before[1]) ^ (odd and position == 1)
                    else layer(x).tanh()
                )
            value = x.square().mean()
            if odd and kind == "no backward":
                return value.detach()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    room = runner.compare(make, steps=10, drifts=True)
    if runner.way in ("offload_all", "recompute_all", "smallest"):
        assert room.journal().steps[-1].mode is Mode.PLANNED


def test_another_shape_for_good(runner: Runner) -> None:
    runner_steps = 14

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        return model(batch(index, ROWS if index < 5 else ROWS // 2)).square().mean()

    room = runner.compare(loop(loss=loss), steps=runner_steps, drifts=True)
    if runner.way in ("offload_all", "recompute_all", "smallest"):
        assert room.journal().steps[-1].mode in (Mode.PLANNED, Mode.PLAIN)


def test_backward_outside_of_the_step(runner: Runner) -> None:
    def run(room: Room | None, made: Made) -> list[torch.Tensor]:
        model, optimizer, _ = made
        values = []
        for index in range(STEPS):
            with room.step() if room is not None else contextlib.nullcontext():
                value = model(batch(index)).square().mean()
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(value.detach())
        return [*values, *model.parameters()]

    expected = run(None, loop()())
    made = loop()()
    with runner.fit(*made[:2]) as room:
        assert_same(expected, run(room, made))
    assert not any(record.needs for record in room.journal().steps)


def test_backward_outside_after_plans_were_made(runner: Runner) -> None:
    """The last steps' backward comes when the next step is under way, or when the room is gone."""

    def run(room: Room | None, made: Made) -> list[torch.Tensor]:
        model, _optimizer, step = made
        values = []
        for index in range(4):
            with room.step() if room is not None else contextlib.nullcontext():
                values.append(step(index))
        graphs = []
        for index in range(4, 7):
            with room.step() if room is not None else contextlib.nullcontext():
                graphs.append(model(batch(index)).square().mean())
                if index == 5:
                    graphs.pop(0).backward()
        graphs.pop(0).backward()
        if room is not None:
            room.detach()
        graphs.pop(0).backward()
        return [*values, *(parameter.grad for parameter in model.parameters())]

    if runner.way == "smallest":
        runner.find_smallest(loop())
    expected = run(None, loop()())
    made = loop()()
    with runner.fit(*made[:2]) as room:
        assert_same(copy_values(expected), copy_values(run(room, made)))


def test_backward_never_runs(runner: Runner) -> None:
    made = loop()()
    with runner.fit(*made[:2]) as room:
        for index in range(8):
            with room.step():
                value = made[0](batch(index)).square().mean() if index % 2 else made[2](index)
            del value
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
        kept = [made[0](batch(0))]
        with room.step():
            kept.append(made[0](batch(1)))
    del kept


def test_the_first_steps_are_no_training_steps(forced: Callable[[str], Runner]) -> None:
    """What is learnt from them must not hold for the others."""
    runner = forced("smallest")
    runner.find_smallest(loop())
    runner.add_room(1 / 16)
    made = loop()()
    with runner.fit(*made[:2]) as room:
        for index in range(4):
            with room.step(), torch.no_grad():
                made[0](batch(index))
        for index in range(6):
            with room.step():
                made[2](index)
        last = room.journal().steps[-1]
        assert last.mode is Mode.PLANNED, last
        assert 0 < last.peak_bytes <= room.budget_bytes


def test_one_forward_without_backward_does_not_end_planning(forced: Callable[[str], Runner]) -> None:
    runner = forced("smallest")
    runner.find_smallest(loop())
    made = loop()()
    with runner.fit(*made[:2]) as room:
        with room.step():
            made[0](batch(0))
        for index in range(6):
            with room.step():
                made[2](index)
        assert room.journal().steps[-1].mode is Mode.PLANNED, room.journal().steps[-1]


# Exceptions -----------------------------------------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    """Raises on command, on the way there or back."""

    error: type[BaseException] | None = None
    where = ""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        if Raises.where == "forward" and Raises.error is not None:
            raise Raises.error("on command")
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Raises.where == "backward" and Raises.error is not None:
            raise Raises.error("on command")
        return gradient


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt], ids=["error", "ctrl-c"])
@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_an_exception_inside_the_step(
    runner: Runner, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raises, "where", where)

    def run(room: Room | None, made: Made) -> list[torch.Tensor]:
        model, optimizer, step = made
        values = []
        for index in range(8):
            # In a step that is being captured, in a planned one, and in two after each other.
            monkeypatch.setattr(Raises, "error", error if index in (1, 4, 5) else None)
            try:
                with room.step() if room is not None else contextlib.nullcontext():
                    if where == "between" and index in (1, 4, 5):
                        model(batch(index)).sum()
                        raise error("on command")
                    values.append(step(index))
            except error:
                values.append(torch.zeros(()))
            optimizer.zero_grad()  # no step begins with gradients
        return [*values, *model.parameters()]

    make = loop(lambda: Layers(Raises.apply))
    monkeypatch.setattr(Raises, "error", None)
    if runner.way == "smallest":
        runner.find_smallest(make)
    expected = run(None, make())
    monkeypatch.setattr(Raises, "error", None)
    made = make()
    with runner.fit(*made[:2]) as room:
        assert_same(copy_values(expected), copy_values(run(room, made)))
        gc.collect()
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
        assert room.journal().steps[-1].mode is MODES.get(runner.way, Mode.PLANNED)


@pytest.mark.parametrize("at", range(5))
def test_ctrl_c_while_waiting_for_a_transfer(
    forced: Callable[[str], Runner], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = forced("offload_all")
    expected = collect(loop()(), None, STEPS)
    made = loop()()
    optimizer = as_list(made[1])[0]
    with runner.fit(*made[:2]) as room:
        waits = [0]
        finish = room._transfers.finish

        def interrupted(moved: Any) -> None:
            waits[0] += 1
            if armed and waits[0] == armed[0]:
                raise KeyboardInterrupt
            finish(moved)

        armed: list[int] = []
        monkeypatch.setattr(room._transfers, "finish", interrupted)
        for index in range(STEPS):
            if index == 4:
                armed[:], waits[0] = [1 + 2 * at], 0
                with pytest.raises(KeyboardInterrupt), room.step():
                    # As the step, without the optimizer, so that it can be done again.
                    made[0](batch(index)).square().mean().backward()
                armed.clear()
                optimizer.zero_grad()
            waits[0] = 0
            with room.step():
                assert_same(expected["produced"][index], made[2](index))
            if index >= 3:
                assert waits[0] > 8
        assert room._transfers._copies == 0  # type: ignore[attr-defined]


# Faults of the tiers --------------------------------------------------------------------------------------------------


def fail(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
@pytest.mark.parametrize("way", ["capture", "offload_all"])
def test_a_full_disk_where_there_is_room_to_stay(
    forced: Callable[[str], Runner],
    way: str,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = forced(way)
    make = loop()
    expected = collect(make(), None, STEPS)
    made = make()
    with runner.fit(*made[:2]) as room, caplog.at_level(logging.WARNING):
        produced = []
        for index in range(STEPS):
            with monkeypatch.context() as patch:
                if index in (1, 4):
                    patch.setattr(os, call, fail)
                    # What was claimed before must be used up, or nothing is asked of the disk.
                    room._transfers._spill.file_bytes = 0  # type: ignore[attr-defined]
                with room.step():
                    produced.append(made[2](index))
        assert_same(expected["produced"], copy_values(produced))
        assert room.journal().steps[-1].offloaded_bytes > 0
        assert room._transfers._copies == 0  # type: ignore[attr-defined]
        assert caplog.text.count("stay there") == 1


@pytest.mark.parametrize(("call", "error"), [("posix_fallocate", TierFull), ("pwrite", TransferFailed)])
def test_a_full_disk_where_there_is_none(
    forced: Callable[[str], Runner], call: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = forced("smallest")
    make = loop()
    runner.find_smallest(make)
    expected = collect(make(), None, STEPS)
    made = make()
    with runner.fit(*made[:2]) as room:
        produced = []
        for index in range(STEPS):
            if index == 4:
                with monkeypatch.context() as patch, pytest.raises(error, match="[Nn]o (room|space)"), room.step():
                    patch.setattr(os, call, fail)
                    room._transfers._spill.file_bytes = 0  # type: ignore[attr-defined]
                    made[2](index)
                as_list(made[1])[0].zero_grad()
            with room.step():
                produced.append(made[2](index))
        assert_same(expected["produced"], copy_values(produced))
        assert room.journal().steps[-1].mode is Mode.PLANNED
        assert room._transfers._copies == 0  # type: ignore[attr-defined]


def test_a_failed_reload_is_tried_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not come back is still below, and what half came back is not used."""
    if runner.way == "recompute_all":
        pytest.skip("nothing is reloaded")

    def run(room: Room | None, made: Made) -> list[Any]:
        model, optimizer, step = made
        values: list[Any] = []
        for index in range(STEPS):
            with room.step() if room is not None else contextlib.nullcontext():
                if index != 4:
                    values.append(step(index))
                    continue
                value = model(batch(index)).square().mean()
                if room is not None:
                    for failing in ("preadv", "empty"):
                        with monkeypatch.context() as patch, pytest.raises(TransferFailed):
                            if failing == "preadv":
                                patch.setattr(os, "preadv", fail)
                            else:
                                patch.setattr(elbowroom.runtime.transfers.torch, "empty", no_memory)
                            value.backward(retain_graph=True)
                        optimizer.zero_grad()
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*values, *model.parameters()]

    def no_memory(*_: Any, dtype: torch.dtype, **__: Any) -> Any:
        if dtype is torch.uint8:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return empty(*_, dtype=dtype, **__)

    empty = torch.empty

    make = loop()
    expected = run(None, make())
    if runner.way == "smallest":
        runner.find_smallest(make)
        runner.add_room(3 / 4)
    made = make()
    with runner.fit(*made[:2]) as room:
        assert_same(copy_values(expected), copy_values(run(room, made)))


def test_the_disk_recovers(forced: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal, what was claimed before is still good."""
    runner = forced("offload_all")
    made = loop()()
    with runner.fit(*made[:2]) as room:
        for index in range(4):
            with room.step():
                made[2](index)
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", fail)
            with room.step():
                made[0](batch(4, rows=4000)).square().mean()  # more than there is
            for index in range(3):
                with room.step():
                    made[2](index)
                assert room.journal().steps[-1].offloaded_bytes > 0


def test_spill_folders_that_will_not_do(tmp_path: pathlib.Path, profile: HardwareProfile) -> None:
    model = Layers()
    for folder in (tmp_path / "missing", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="spill_folder"):
            elbowroom.fit(model, adam(model), HUGE, spill_folder=folder, profile=profile)
    if os.getuid():
        tmp_path.chmod(0o500)
        with pytest.raises(UsageError, match="spill_folder"):
            elbowroom.fit(model, adam(model), HUGE, spill_folder=tmp_path, profile=profile)
    elbowroom.fit(model, adam(model), HUGE, profile=profile).detach()  # the failed attempts left no mark


# Bytes that others write to unseen ------------------------------------------------------------------------------------


def numpy_batch(index: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """A batch in memory of NumPy's, and what writes the next one to the same place."""
    memory, following = batch(index).numpy().copy(), batch(index + 1).numpy()
    return torch.from_numpy(memory), lambda: memory.__setitem__(..., following)


def shared_batch(index: int) -> tuple[torch.Tensor, Callable[[], Any]]:
    """A batch in memory that another process writes to: here, a second mapping of it."""
    whole = batch(index).share_memory_()
    handle = whole.untyped_storage()._share_filename_cpu_()
    other = torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle), 0, whole.shape).numpy()
    following = batch(index + 1).numpy()
    return whole, lambda: other.__setitem__(..., following)


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "let go"])
@pytest.mark.parametrize("kind", [numpy_batch, shared_batch], ids=["numpy", "process"])
def test_a_batch_that_is_overwritten_before_the_backward_pass(runner: Runner, kind: Any, is_held: bool) -> None:
    """What was computed from it has the values it had; what was saved of it has those it has now."""
    held: list[torch.Tensor] = []

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x, overwrite = kind(index)
        value = model(torch.sin(x * model.scale) * x.cos()).square().mean()
        held[:] = [x] if is_held else []
        del x
        press()
        if index in (1, 3, 4):
            overwrite()
        press()
        return value

    def scaled() -> nn.Module:
        model = Layers()
        model.scale = nn.Parameter(torch.full((WIDTH,), 1.25))
        return model

    runner.compare(loop(scaled, loss), more=0.05)


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
def test_an_activation_that_numpy_writes_to(runner: Runner, is_early: bool) -> None:
    """Autograd finds in it what was written, and in what was computed from it before what had been computed."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = model.before[1](torch.relu(model.before[0](batch(index))))
        y = torch.sigmoid(x)
        z = torch.sin(y) if is_early else x
        held = y.detach()
        shown = held.numpy() if is_early else None
        value = (model.after[0](z) * z.cos()).square().mean()
        del x, y, z
        press()
        shown = held.numpy() if shown is None else shown
        if index in (1, 3, 4):
            shown *= 0.5
        value.backward(retain_graph=True)
        return value

    runner.compare(loop(loss=loss))


SHOWN: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda tensor: tensor.numpy(),
    lambda tensor: np.asarray(tensor),
    lambda tensor: np.from_dlpack(tensor),
    lambda tensor: torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).numpy(),
    lambda tensor: tensor.share_memory_().numpy(),
)
"""Ways to the memory of a tensor by which others write to it."""


def test_numpy_is_first_shown_a_batch_after_results_computed_from_it_were_moved(runner: Runner) -> None:
    """What was computed before the write is recomputed from the values of before."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = batch(index)
        value = model.after[0](torch.sin(x * model.before[0].bias)).square().mean()
        press()
        shown = SHOWN[index % len(SHOWN)](x)
        np.multiply(shown, 0.5, out=shown)
        press()
        return value

    runner.compare(loop(loss=loss), drifts=True)


@pytest.mark.parametrize("is_early", [True, False], ids=["before", "after"])
def test_numpy_writes_to_an_activation_that_the_program_then_lets_go_of(runner: Runner, is_early: bool) -> None:
    """Autograd finds what was written, though the program no longer holds the tensor."""

    def loss(model: nn.Module, index: int) -> torch.Tensor:
        show = SHOWN[index % len(SHOWN)]
        h = torch.relu(model.before[0](batch(index)))
        shown = show(h.detach()) if is_early else None
        value = model.after[0](h).square().mean()
        press()
        shown = show(h.detach()) if shown is None else shown
        np.multiply(shown, 0.5, out=shown)
        del h, shown
        press()
        return value

    runner.compare(loop(loss=loss), drifts=True)


# Threads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward", "step"])
def test_a_thread_of_the_users(runner: Runner, part: str) -> None:
    def in_thread(work: Callable[[], Any]) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(work()))
        thread.start()
        thread.join()
        return results[0]

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> torch.Tensor:
            first = model(batch(index))
            second = in_thread(lambda: model(first * 0.5)) if part == "forward" else model(first * 0.5)
            value = second.square().mean()
            in_thread(value.backward) if part == "backward" else value.backward()
            in_thread(optimizer.step) if part == "step" else optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return model, optimizer, step

    if part == "step" and runner.way == "smallest":
        pytest.skip("ops in another thread are not seen, so the budget does not hold for them")
    runner.compare(make, drifts=True)


def test_backwards_in_many_threads(runner: Runner) -> None:
    if runner.way == "smallest":
        pytest.skip("the smallest budget is another one for each order in which the threads run")

    def make() -> Made:
        torch.manual_seed(5)
        model = Layers()
        optimizer = sgd(model)

        def step(index: int) -> list[torch.Tensor]:
            inputs = [batch(10 * index + part).requires_grad_() for part in range(4)]
            values = [model(x).square().mean() for x in inputs]
            threads = [
                threading.Thread(target=torch.autograd.grad, args=(value, x))
                for value, x in zip(values, inputs, strict=True)
            ]
            values.append(model(batch(index)).square().mean())
            for thread in threads:
                thread.start()
            values[-1].backward()
            for thread in threads:
                thread.join()
            optimizer.step()
            optimizer.zero_grad()
            return [value.detach() for value in values]

        return model, optimizer, step

    runner.compare(make, drifts=True)


def test_the_collector_runs_in_the_thread_that_moves(
    forced: Callable[[str], Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it frees there must not wait for that very thread."""
    model, optimizer, step = loop()()
    write = os.pwrite
    with forced("capture").fit(model, optimizer) as room:
        transfers = room._transfers
        graphs: list[Any] = []
        with room.step():
            graphs.append(model(batch(0)))
        storage = torch.ones(1 << 16).untyped_storage()

        def collecting(*args: Any) -> int:
            graphs.clear()
            while len(copies) > 2:  # those whose transfers are queued behind this one
                transfers.finish(copies[-1])
                transfers.discard(copies.pop())
            return write(*args)

        copies: list[Any] = []
        with monkeypatch.context() as patch:
            gate = threading.Event()
            patch.setattr(os, "pwrite", lambda *args: gate.wait() and collecting(*args))
            copies += [transfers.offload(storage) for _ in range(4)]
            gate.set()
            copies.insert(0, transfers.offload(storage))
            transfers.finish(copies[0])
        with room.step():
            step(1)
        for one in copies:
            transfers.discard(one)
        assert transfers._copies == 0  # type: ignore[attr-defined]


# Rooms ----------------------------------------------------------------------------------------------------------------


def test_two_rooms_on_one_model(profile: HardwareProfile) -> None:
    model = Layers()
    with elbowroom.fit(model, adam(model), HUGE, profile=profile):
        with pytest.raises(UsageError, match="already has a room"):
            elbowroom.fit(model, adam(model), HUGE, profile=profile)
        copied = copy.deepcopy(model)
        elbowroom.fit(copied, adam(copied), HUGE, profile=profile).detach()
    elbowroom.fit(model, adam(model), HUGE, profile=profile).detach()


def test_a_model_in_a_room_can_be_pickled(profile: HardwareProfile) -> None:
    model = nn.Linear(2, 2)
    with elbowroom.fit(model, adam(model), HUGE, profile=profile):
        again = pickle.loads(pickle.dumps(model))
    with elbowroom.fit(again, adam(again), HUGE, profile=profile):
        pass


def test_a_forgotten_room_gives_everything_back(profile: HardwareProfile) -> None:
    model = Layers()
    optimizer = sgd(model)
    room = elbowroom.fit(model, optimizer, HUGE, profile=profile, min_offload_bytes=1)
    with room.step():
        model(batch(0)).sum().backward()
    del room  # the leak check does the rest
    gc.collect()
    elbowroom.fit(model, optimizer, HUGE, profile=profile).detach()


def test_models_that_cannot_be_fitted(profile: HardwareProfile) -> None:
    with pytest.raises(UsageError, match="no parameters"):
        elbowroom.fit(nn.ReLU(), adam(Layers()), HUGE, profile=profile)
    model = Layers()
    model.after[0].to("meta")
    with pytest.raises(UsageError, match="cpu.*meta"):
        elbowroom.fit(model, adam(model), HUGE, profile=profile)
    with pytest.raises(UsageError, match="meta"):
        elbowroom.fit(model.to("meta"), adam(Layers()), HUGE, profile=profile)
    with pytest.raises(UsageError, match="Optimizer"):
        elbowroom.fit(Layers(), ["adam"], HUGE, profile=profile)  # type: ignore[list-item]


@pytest.mark.parametrize(
    "budget", ["", "many", -1, 0, float("nan"), float("inf"), "10%%", "0%", "5 parsecs", None, True]
)
def test_budgets_that_mean_nothing(budget: Any, profile: HardwareProfile) -> None:
    model = Layers()
    with pytest.raises(UsageError, match="memory_budget"):
        elbowroom.fit(model, adam(model), budget, profile=profile)


def test_detach_then_train_plainly(runner: Runner) -> None:
    expected_made = loop()()
    expected = collect(expected_made, None, STEPS)
    model, optimizer, step = loop()()
    before = set(model.__dict__), {name: len(vars(module)) for name, module in model.named_modules()}
    room = runner.fit(model, optimizer)
    produced = []
    for index in range(5):
        with room.step():
            produced.append(step(index))
    room.detach()
    room.detach()
    assert (set(model.__dict__), {name: len(vars(module)) for name, module in model.named_modules()}) == before
    with pytest.raises(UsageError, match="detached"), room.step():
        pass
    for index in range(5, STEPS):
        produced.append(step(index))
    assert_same(expected["produced"], copy_values(produced))


def test_steps_do_not_nest(profile: HardwareProfile) -> None:
    model = Layers()
    with elbowroom.fit(model, adam(model), HUGE, profile=profile) as room:
        with room.step(), pytest.raises(UsageError, match="inside"), room.step():
            pass
        with room.step():
            pass


def test_detach_inside_of_a_step(runner: Runner) -> None:
    """Either it is refused, or the step ends as it would have."""
    expected_made = loop()()
    expected = [expected_made[2](index) for index in range(5)]
    model, optimizer, step = loop()()
    with runner.fit(model, optimizer) as room:
        for index in range(4):
            with room.step():
                step(index)
        with room.step():
            with contextlib.suppress(UsageError):
                room.detach()
            assert_same(expected[4], step(4))


def test_nothing_is_attached_where_nothing_is_needed(profile: HardwareProfile) -> None:
    made = loop()()
    with elbowroom.fit(*made[:2], HUGE, profile=profile, min_offload_bytes=1) as room:
        for index in range(STEPS):
            with room.step():
                hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
                made[2](index)
        assert hooks is None
        assert [record.mode for record in room.journal().steps[3:]] == [Mode.PLAIN] * (STEPS - 3)
        assert room.journal().steps[-1].saves == 0


def test_a_profiler_of_the_users(runner: Runner) -> None:
    """Inside the step, and around some steps."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    def run(room: Room | None, made: Made) -> list[torch.Tensor]:
        values = []
        for index in range(STEPS):
            with room.step() if room is not None else contextlib.nullcontext():
                if index in (1, 4):
                    with profiler(activities=[ProfilerActivity.CPU]) as seen:
                        values.append(made[2](index))
                    assert any("linear" in event.key or "mm" in event.key for event in seen.key_averages())
                else:
                    values.append(made[2](index))
        return values

    expected = run(None, loop()())
    made = loop()()
    with runner.fit(*made[:2]) as room:
        assert_same(copy_values(expected), copy_values(run(room, made)))


def test_the_functional_transforms(runner: Runner) -> None:
    def loss(model: nn.Module, index: int) -> torch.Tensor:
        x = batch(index)
        parameters = dict(model.before[0].named_parameters())
        jacobian = torch.func.vmap(
            torch.func.grad(lambda row: torch.func.functional_call(model.before[0], parameters, (row,)).sin().sum())
        )(x)
        return model(x + jacobian).square().mean()

    runner.compare(loop(loss=loss))


def test_planning_ahead_changes_nothing(profile: HardwareProfile) -> None:
    model, optimizer, step = loop()()
    group = as_list(optimizer)[0].param_groups[0]
    before = copy_values([model.state_dict(), as_list(optimizer)[0].state_dict()])
    random_state = torch.get_rng_state()

    def whole() -> None:
        step(0)
        functional.dropout(torch.ones(3))
        group["lr"] *= 0.5

    with elbowroom.fit(model, optimizer, HUGE, profile=profile, step=whole) as room:
        assert room.planned is not None
        after = copy_values([model.state_dict(), as_list(optimizer)[0].state_dict()])
        assert_same(before, after)
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(parameter.grad is None for parameter in model.parameters())
