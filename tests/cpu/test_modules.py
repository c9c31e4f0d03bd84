"""Modules and lines of ops: those that hooks would find, without hooks; and in errors of steps that do not fit."""

from __future__ import annotations

import dataclasses
import inspect
import pathlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elbowroom
from elbowroom.errors import Infeasible, TraceError
from elbowroom.hardware.shipped import list_shipped, load_shipped
from elbowroom.hooks.module_paths import UNKNOWN, ModulePaths, Origin
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ir.trace import Op, Role, Trace
from elbowroom.tracing.origins import OpOrigins
from tests.models import MODELS

HERE = pathlib.Path(__file__).name


class HookOracle:
    """Tells by hooks where each op comes from: on the stack of modules, or made between a module's begin and end."""

    def __init__(self, model: nn.Module) -> None:
        self.stack: list[nn.Module] = []
        self.spans: list[list[Any]] = []  # a module, and the numbers of the nodes that were made in it
        for module in model.modules():
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(module)
        self.spans.append([module, torch._C._autograd._get_sequence_nr(), None])

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        assert self.stack.pop() is module
        span = next(each for each in reversed(self.spans) if each[0] is module and each[2] is None)
        span[2] = torch._C._autograd._get_sequence_nr()

    def find(self) -> nn.Module | None:
        """The module of the op that runs."""
        node: Any = torch._C._current_autograd_node()
        if self.stack:
            return self.stack[-1]
        if node is None or hasattr(node, "variable") or is_run_again(sys._getframe()):
            return None
        number = node._sequence_nr()
        inside = [each for each in reversed(self.spans) if each[2] is not None and each[1] <= number < each[2]]
        return min(inside, key=lambda each: each[2] - each[1])[0] if inside else None


def is_run_again(frame: FrameType | None) -> bool:
    """Whether a checkpoint runs a forward pass again, in which transformers calls `forward` and no hooks."""
    return frame is not None and (frame.f_code.co_name == "recompute_fn" or is_run_again(frame.f_back))


@pytest.mark.parametrize("name", ["resnet50", "gpt2", "gpt2_checkpoint", "t5", "lstm"])
def test_the_stack_tells_what_hooks_would(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer, step = MODELS[name]().make()
    oracle = HookOracle(model)
    find = OpOrigins.find
    seen: list[tuple[str | None, nn.Module | None]] = []

    def find_both(origins: OpOrigins) -> Origin:
        found = find(origins)
        seen.append((found.module, oracle.find()))
        return found

    monkeypatch.setattr(OpOrigins, "find", find_both)
    trace = elbowroom.capture(lambda: step(0), model, optimizer)
    compared = [(path, module) for path, module in seen if module is not None]
    assert len(compared) >= 50
    wrong = [
        (path, type(module).__name__)
        for path, module in compared
        if path is None or model.get_submodule(path) is not module
    ]
    assert wrong == []
    # The rest are ops of optimizers, which belong to the module whose parameters they change.
    owners = {
        ".".join(filter(None, (path, key))): path
        for path, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
    }
    for each in trace.storages:
        if each.role is Role.PARAMETER:
            assert each.module == owners[each.label]
        elif each.role is Role.GRADIENT:
            assert each.module == owners[each.label.removeprefix("gradient of ")]
        elif each.role is Role.OPTIMIZER_STATE:
            assert each.module in owners.values()
    last = [op for op in trace.ops if op.tick > trace.needs[-1].tick and op.writes]
    assert sum(op.module is not None for op in last) > 0.9 * len(last) > 20


@pytest.mark.parametrize("name", ["gpt2_checkpoint", "lstm"])
def test_looking_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above all not how long a tensor lives: Python keeps the variables of a function that have been looked at."""
    model, optimizer, step = MODELS[name]().make()
    named = elbowroom.capture(lambda: step(0), model, optimizer)
    monkeypatch.setattr(OpOrigins, "find", lambda origins: UNKNOWN)
    bare = elbowroom.capture(lambda: step(0), model, optimizer)
    assert named == bare  # which leaves out modules and lines
    assert {op.line for op in bare.ops} == {""} != {op.line for op in named.ops}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(functional.gelu(self.first(x)))


class Net(nn.Module):
    """Has a layer under two names, and calls others by other methods, or in a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(32, 32)
        self.encoder, self.decoder = nn.ModuleDict({"embed": shared}), nn.Sequential(shared, nn.Tanh())
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.tail = Layer()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder["embed"](x).sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encode(x)
        x = self.layers[0].forward(x)
        for reentrant in (True, False):
            x = checkpoint(self.layers[1], x, use_reentrant=reentrant)  # type: ignore[assignment]
        x = self.layers[2](x)
        return self.decoder(self.tail.forward(x))

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def capture(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], *, foreach: bool = False) -> Trace:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

    def step() -> None:
        run(torch.ones(16, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return elbowroom.capture(step, model, optimizer)


def find(trace: Trace, name: str) -> list[Op]:
    return [op for op in trace.ops if op.name.split(".")[1] == name]


def test_a_checkpoint_that_calls_forward_has_the_path_of_its_layer() -> None:
    model, optimizer, step = MODELS["gpt2_checkpoint"]().make()
    trace = elbowroom.capture(lambda: step(0), model, optimizer)
    lines: dict[tuple[str, str], list[str | None]] = {}
    for op in trace.ops:
        if op.name in ("aten.add.Tensor", "aten.addmm.default", "aten.tanh.default"):
            lines.setdefault((op.name, op.line), []).append(op.module)
    residual = [modules for (name, line), modules in lines.items()
                if name == "aten.add.Tensor" and modules[0] == "transformer.h.0"]  # fmt: skip
    assert len(residual) >= 2
    for modules in residual:  # forward in order, and the last first when they are run again
        assert modules[:4] == [f"transformer.h.{layer}" for layer in range(4)]
        assert set(modules) == set(modules[:4])
    assert max(map(len, residual)) == 8


def test_modules_that_are_shared_or_not_called_or_run_again() -> None:
    model = Net()
    trace = capture(model, model.compute_loss)
    # Of the layer with two names, the one that it is called by; where `forward` is called, what is known of its class.
    calls = [op.module for op in find(trace, "addmm")]
    once = ["layers.1.first", "layers.1.second"]
    others = ["layers.2.first", "layers.2.second"]
    again = [*once, *once]  # by both checkpoints, in the backward pass; the second linear's result may not be needed
    assert calls[:11] == ["encoder.embed", "layers.0.first", "layers.0.second", *again, *others, "tail.first",
                          "tail.second"]  # fmt: skip
    assert calls[11] == "decoder.0"
    assert set(calls[12:]) <= set(once) and calls[12:].count("layers.1.first") == 2
    assert [op.module for op in find(trace, "sigmoid")] == [""]  # in a method of the model
    gelus = [op.module for op in find(trace, "gelu")]
    assert gelus == ["", *["layers.1"] * 2, "layers.2", "", *["layers.1"] * 2]
    assert [op.module for op in find(trace, "gelu_backward")] == [*gelus[:5]][::-1]
    assert [op.module for op in find(trace, "tanh_backward")] == ["decoder.1"]
    assert {op.module for op in find(trace, "pow")} == {""}
    assert all(op.line.startswith(f"{pathlib.Path('tests/cpu') / HERE}:") for op in find(trace, "gelu"))
    source, first = inspect.getsourcelines(Layer.forward)
    number = first + next(index for index, line in enumerate(source) if "gelu" in line)
    assert {op.line.rpartition(":")[2] for op in (*find(trace, "gelu"), *find(trace, "gelu_backward"))} == {str(number)}


def test_a_model_of_the_same_class_beside_it_is_not_it() -> None:
    model, teacher = Net(), Net()
    trace = capture(model, lambda x: (model(x) - teacher(x).detach()).square())
    theirs = [op for op in find(trace, "addmm") if op.module is None]
    assert len(theirs) == 12  # all of the teacher's
    assert [op.module for op in find(trace, "sigmoid")] == ["", None]
    assert {op.module for op in find(trace, "pow")} == {None}
    (line,) = {op.line for op in find(trace, "pow")}
    assert line.startswith("tests/cpu/") and line.rpartition(":")[2].isdigit()


class Doubled(torch.autograd.Function):
    """Has a node with attributes that PyTorch's own nodes have, too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.variable = ctx.next = x.shape
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.sinh()


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = Doubled.apply(x)  # type: ignore[no-untyped-call]
        return doubled


def test_ops_of_custom_functions_belong_to_the_module_that_applies_them() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Tanh(), Doubling()))
    (op,) = find(capture(model, model), "sinh")
    source, first = inspect.getsourcelines(Doubled.backward)
    assert (op.module, op.line.rpartition(":")[2]) == ("1.1", str(first + len(source) - 1))


def test_gradients_of_gradients_belong_to_the_module_of_the_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def penalty(x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        return gradient.square()

    trace = capture(model, penalty)
    assert {op.module for op in find(trace, "mm")} == {"0", "2"}
    assert {op.module for op in find(trace, "tanh_backward")} == {"1"}


def test_an_optimizer_that_works_on_all_parameters_is_in_no_module() -> None:
    model = Net()
    trace = capture(model, model, foreach=True)
    updates = [op for op in trace.ops if "_foreach_" in op.name]
    assert updates and {op.module for op in updates} == {None}


class Failing(nn.Module):
    """Fails in the middle of its forward pass, as often as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.failures = nn.Linear(32, 32), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("on purpose")
        return x


def list_hooks(model: nn.Module) -> list[Any]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [hook for module in model.modules() for kind in kinds for hook in getattr(module, kind).values()]


def test_a_step_that_fails_leaves_nothing_behind(profile: HardwareProfile) -> None:
    model = nn.Sequential(Failing(), nn.Tanh())
    model[0].failures = 1
    with pytest.raises(TraceError, match="on purpose"):
        capture(model, model)
    assert list_hooks(model) == []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside: list[Any] = []

    def step() -> None:
        model(torch.ones(16, 32)).mean().backward()
        inside.extend(list_hooks(model[0]))
        optimizer.step()
        optimizer.zero_grad()

    with elbowroom.fit(model, optimizer, "1GiB", profile=profile) as room:
        with pytest.raises(RuntimeError, match="on purpose"), room.step():
            step()
        while room.planned is None:
            with room.step():
                step()
        assert {op.module for op in find(room.planned.trace, "addmm")} == {"0.inner"}
    assert inside == list_hooks(model) == []


def test_live_and_fake_captures_name_the_same_modules(profile: HardwareProfile) -> None:
    model, optimizer, step = MODELS["vgg16_bn"]().make()
    fake = elbowroom.capture(lambda: step(0), model, optimizer)
    with elbowroom.fit(model, optimizer, "4GiB", profile=profile) as room:
        while room.planned is None:
            with room.step():
                step(0)
        live = room.planned.trace
    assert [(op.module, op.line) for op in live.ops] == [(op.module, op.line) for op in fake.ops]
    assert len({op.module for op in live.ops}) > 40


def test_compiled_modules_are_called_by_the_outer_one(profile: HardwareProfile) -> None:
    """What runs inside of compiled code has the path of the module that was compiled, and is compiled once."""
    torch._dynamo.reset()
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    model = nn.Sequential(Layer(), Layer(), nn.Linear(32, 32))
    model[0].compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.compile(model[1], backend=backend)

    def step() -> None:
        model[2](second(model[0](torch.ones(16, 32)))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    assert len(compiled) == 2
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile) as room:
        while room.planned is None:
            with room.step():
                step()
        trace = room.planned.trace
    torch._dynamo.reset()
    assert len(compiled) == 2
    assert [op.module for op in find(trace, "addmm")] == ["0", "0", "1", "1", "2"]
    assert [op.module for op in find(trace, "gelu_backward")] == ["1", "0"]


# -- steps that are not captured --------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Two layers, of which the wider one makes or takes more than all of the rest."""

    def __init__(self, widths: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.wide = nn.Linear(*widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.wide(x)


@pytest.mark.usefixtures("whole_ops")
@pytest.mark.parametrize("where", ["forward", "backward", "outside"])
def test_an_op_that_does_not_fit_names_its_module(where: str, profile: HardwareProfile) -> None:
    model = Wide((32, 1 << 15))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = 2 if where == "backward" else 256
    made = (1 << 15) * rows * 4  # bytes that `wide` makes, and takes 4 MiB of weights, and of gradients

    def step() -> None:
        loss = model(torch.ones(rows, 32))
        loss.exp().mean().backward()

    budget = {"forward": made - 1, "outside": made + (8 << 20), "backward": (6 << 20)}[where]
    with elbowroom.fit(model, optimizer, budget, mode="dynamic", profile=profile, manages="activations") as room:
        with pytest.raises(Infeasible) as caught, room.step():
            step()
        assert [each.mode for each in room.journal().steps] == []
    error, said = caught.value, str(caught.value)
    expected = {"forward": "wide", "outside": None, "backward": "wide"}[where]
    assert error.module == expected
    if where == "forward":
        assert "runs in wide (tests/cpu/test_modules.py:" in said
    elif where == "outside":
        source, first = inspect.getsourcelines(test_an_op_that_does_not_fit_names_its_module)
        number = first + next(index for index, line in enumerate(source) if "loss.exp()" in line)
        assert f"runs (tests/cpu/test_modules.py:{number})" in said
    else:
        assert "in the backward pass of wide or of what follows it" in said


def test_steps_that_are_not_captured_do_not_look(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(256, 32)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = elbowroom.capture(step, model, optimizer)
    smallest = elbowroom.smallest_budget(model, optimizer, step, profile=profile, min_offload_bytes=1024)
    looks = 0
    look = ModulePaths.look

    def count(paths: ModulePaths, frames: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(paths, frames)

    monkeypatch.setattr(ModulePaths, "look", count)
    for mode in ("auto", "dynamic"):
        options = {"mode": mode, "profile": profile, "min_offload_bytes": 1024}
        with elbowroom.fit(model, optimizer, smallest + (64 << 10), **options) as room:
            for _ in range(6):
                before = looks
                with room.step():
                    step()
                record = room.journal().steps[-1]
                assert (looks > before) == (record.mode is Mode.CAPTURE), record
            assert record.mode is (Mode.DYNAMIC if mode == "dynamic" else Mode.PLANNED)
    assert looks >= len(trace.ops)


def test_an_infeasible_plan_names_the_module_and_what_is_there() -> None:
    model = Wide((32, 1 << 12))
    trace = capture(model, model)
    costs = elbowroom.price(trace, load_shipped(list_shipped()[0]))
    with pytest.raises(Infeasible) as caught:
        elbowroom.plan(trace, costs, 1 << 10)
    error = caught.value
    at_peak = next(op for op in trace.ops if (op.name, op.module, op.line) == (error.op, error.module, error.line))
    assert at_peak.module is not None
    assert f"{error.op} runs in {error.module} ({error.line}): " in str(error)
    bare = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, module=None, line="") for op in trace.ops))
    with pytest.raises(Infeasible) as caught:
        elbowroom.plan(bare, costs, 1 << 10)
    assert f"{error.op} runs: " in str(caught.value)
