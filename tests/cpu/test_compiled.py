"""Compiled models run compiled in a room, with the same bits, as often as without one."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

import elbowroom
from elbowroom.api import open_room
from elbowroom.errors import Infeasible
from elbowroom.hooks.compiled_calls import listen
from elbowroom.hooks.compiled_regions import is_in_region
from elbowroom.hooks.grouped_step import GroupedStep
from elbowroom.hooks.reached_modules import find_modules
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.optimizer_steps import OptimizerSteps
from tests import pressure
from tests.state_jobs import Away, make_batch

WIDTH, ROWS = 16, 256
PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):  # no pool of processes, which would stay
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Writes to the running statistics of its batch norm and to a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.BatchNorm1d(4 * WIDTH)
        self.dropout, self.second = nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0))
        return x + self.dropout(self.second(nn.functional.gelu(self.norm(self.first(x))))) * 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin() * self.blocks[0].mean.cos()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Job:
    """A compiled model. Counts its graphs that were compiled, and calls of those."""

    def __init__(self, backend: str, how: str) -> None:
        self.compiled = self.calls = 0
        torch.manual_seed(0)
        self.model = Net()
        self.begin = [each.clone() for each in self.model.state_dict().values()]
        if backend == "inductor":
            compiler: Any = lambda graph, example: compile_fx(graph, example, inner_compile=self._compile_inner)  # noqa: E731
        else:
            compiler = aot_autograd(fw_compiler=lambda graph, example: self._count(make_boxed_func(graph.forward)))
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.model
        if how == "whole":
            self.run = torch.compile(self.model, backend=compiler)
        else:
            for block in self.model.blocks:
                block.compile(backend=compiler)

    def _compile_inner(self, graph: torch.fx.GraphModule, example: Any, **options: Any) -> Any:
        return self._count(compile_fx_inner(graph, example, **options))

    def _count(self, code: Callable[[Any], Any]) -> Callable[[Any], Any]:
        self.compiled += 1

        def call(inputs: Any) -> Any:
            self.calls += 1
            return code(inputs)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def train(
        self, rows: Sequence[int], room_options: dict[str, Any] | None = None
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]], list[Any]]:
        """From the beginning: losses and state; graphs compiled and called in each step, the last outside of the room;
        records of the steps."""
        with torch.no_grad():
            for there, begin in zip(self.model.state_dict().values(), self.begin, strict=True):
                there.copy_(begin)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        room = None if room_options is None else elbowroom.fit(self.model, optimizer, **room_options)
        with room or contextlib.nullcontext():
            values, counts = self._train(rows, optimizer, room)
        values += [each.detach().clone() for each in self.model.state_dict().values()]
        return values, counts, [] if room is None else list(room.journal().steps)

    def _train(
        self, rows: Sequence[int], optimizer: torch.optim.Optimizer, room: elbowroom.Room | None
    ) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
        values, counts = [], []
        for step, count in enumerate((*rows, rows[-1])):
            if room is not None and step == len(rows):
                room.detach()
            before = self.compiled, self.calls
            x = torch.randn(count, WIDTH)
            with room.step() if room is not None and step < len(rows) else contextlib.nullcontext():
                loss = self.run(x)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                values.append(loss.detach().clone())
                del loss
            counts.append((self.compiled - before[0], self.calls - before[1]))
        return values, counts


def is_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("how", ["whole", "by block"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_train_as_without_a_room(backend: str, how: str, profile: HardwareProfile) -> None:
    options = {"profile": profile, "min_offload_bytes": 1024}
    rows = [ROWS] * 5
    job = Job(backend, how)
    values, counts, records = job.train(rows, {"memory_budget": PLENTY, "mode": "dynamic", **options})
    torch._dynamo.reset()
    plain = Job(backend, how)
    expected, expected_counts, _ = plain.train(rows)
    assert is_equal(values, expected) and counts == expected_counts and counts[0][0] > 0 and counts[-1][1] > 0
    peak_bytes = max(record.peak_bytes for record in records)
    shares = (1.0, 0.92, 0.86, 0.8) if how == "by block" else (1.0, 0.97, 0.7)
    moved = 0
    for share in shares:
        for mode in ("auto", "dynamic"):
            budget_bytes = int(share * peak_bytes)
            try:
                values, counts, records = plain.train(rows, {"memory_budget": budget_bytes, "mode": mode, **options})
            except Infeasible:
                assert backend == "inductor" and (share < 0.9 or how == "whole")  # whose code is one op
                continue
            assert is_equal(values, expected)
            assert counts == [(0, called) for _, called in expected_counts]  # nothing is compiled anew
            assert all(record.peak_bytes <= budget_bytes for record in records)
            moved += sum(record.offloaded_bytes for record in records)
    assert moved > 0 or (backend == "inductor" and how == "whole")


@pytest.mark.parametrize("policy", ["predictive", "dtr"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models_under_pressure_everywhere(
    backend: str, policy: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that may leave does so at each request, inside of compiled code too."""
    job = Job(backend, "by block")
    expected, _, _ = job.train([ROWS] * 3)
    pressure.ask_at_every_request(monkeypatch)
    options = {"mode": "dynamic", "policy": policy, "min_offload_bytes": 1, "profile": profile}
    values, counts, records = job.train([ROWS] * 3, {"memory_budget": PLENTY, **options})
    assert is_equal(values, expected) and counts == [(0, 6)] * 4
    assert records[-1].offloaded_bytes > 0


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
@pytest.mark.usefixtures("no_ample_room")
def test_shapes_may_change_in_the_middle(mode: str, profile: HardwareProfile) -> None:
    """With another shape, graphs are compiled anew in the middle of a step; with a third one they are used again."""
    rows = [64, 64, 64, 96, 64, 160, 64]
    expected, expected_counts, _ = Job("aot_eager", "by block").train(rows)
    torch._dynamo.reset()
    options = {"mode": mode, "profile": profile, "min_offload_bytes": 1024}
    values, counts, records = Job("aot_eager", "by block").train(rows, {"memory_budget": PLENTY, **options})
    assert is_equal(values, expected) and counts == expected_counts
    assert counts[0][0] > 0 and counts[3][0] > 0
    if mode == "auto":
        modes = [record.mode for record in records]
        assert modes[2] is Mode.PLAIN and modes[3] is modes[5] is Mode.DRIFTED


def test_capturing_ahead_leaves_the_compiler_alone(profile: HardwareProfile) -> None:
    """Run on fake tensors, compiled functions would be marked as ones that cannot be compiled."""
    job = Job("aot_eager", "whole")
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.1)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        job.run(x).backward()
        optimizer.step()

    with elbowroom.fit(job.model, optimizer, PLENTY, step=step, profile=profile) as room:
        assert room.planned is None and job.compiled == 0
        for _ in range(3):
            with room.step():
                step()
    step()
    assert (job.compiled, job.calls) == (2, 8)


def test_a_call_of_compiled_code_is_one_op(profile: HardwareProfile) -> None:
    job = Job("inductor", "by block")
    with elbowroom.fit(job.model, [], PLENTY, profile=profile) as room:
        for _ in range(2):
            with room.step():
                job.run(torch.randn(ROWS, WIDTH)).backward()
        planned = room.planned
        assert planned is not None
    regions = [op for op in planned.trace.ops if op.name.startswith("inductor.")]
    assert [op.name for op in regions] == ["inductor.forward"] * 3 + ["inductor.backward"] * 3
    forward = regions[0]
    written = {view.storage for view in forward.writes}
    assert written & {view.storage for view in forward.reads}  # the buffer
    assert any(planned.trace.storages[storage].created == forward.tick for storage in written)
    assert all(op.barrier for op in regions)
    backward, trace = regions[-1], planned.trace
    released = [need.released for need in trace.needs if need.tick < backward.tick]
    assert backward.tick + 1 in released and backward.tick not in released, "it frees what it reads while it runs"


def test_what_compiled_code_writes_in_place_is_seen(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed from the former contents is not computed again from what compiled code has written there."""

    def train(room: elbowroom.Room | None) -> torch.Tensor:
        with torch.no_grad():
            scale.fill_(2.0)
        model.weight.grad = None
        with room.step() if room is not None else contextlib.nullcontext():
            x = (model.weight * 1.0 + scale).sin().cos()
            change(scale)
            x.sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    @torch.compile(backend="inductor")
    def change(tensor: torch.Tensor) -> None:
        tensor.mul_(3).add_(1)

    model, scale = nn.Linear(64, 64), torch.ones(64, 64)
    model.register_buffer("scale", scale)
    expected = train(None)
    pressure.ask_at_every_request(monkeypatch)
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, [], PLENTY, **options) as room:
        assert torch.equal(train(room), expected)
        assert room.journal().steps[-1].recomputed > 0


@pytest.mark.parametrize(
    ("how", "kind"), [("torch.compile", nn.Sequential), ("torch.compile", Block), ("Module.compile", Block)]
)
@pytest.mark.usefixtures("no_ample_room")
def test_nothing_of_ours_is_compiled(how: str, kind: Callable[..., nn.Module], profile: HardwareProfile) -> None:
    """Of modules of PyTorch's own, hooks would be compiled with the rest, or rather could not be."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) if kind is nn.Sequential else Block()
    options: dict[str, Any] = {"backend": "aot_eager", "fullgraph": how == "torch.compile"}

    def train(step: Callable[[], contextlib.AbstractContextManager[None]]) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for rows in (8, 8, 8, 16, 32):
            with step():
                run(torch.randn(rows, WIDTH)).sum().backward()
        return int(torch._dynamo.utils.counters["frames"]["total"])

    run: Any = model
    if how == "torch.compile":
        run = torch.compile(model, **options)
    else:
        model.compile(**options)
    frames = train(contextlib.nullcontext)
    with elbowroom.fit(model, [], PLENTY, profile=profile) as room:
        assert train(room.step) == frames
        modes = [record.mode for record in room.journal().steps]
    assert modes[2] is Mode.PLAIN and modes[3] is not Mode.PLAIN
    assert modes[4] is not Mode.PLAIN or (how == "torch.compile" and kind is nn.Sequential)


def test_a_module_that_dynamo_leaves_alone_is_not_compiled(profile: HardwareProfile) -> None:
    """A compiled function calls it by one that is not compiled. Dynamo leaves modules of PyTorch alone."""
    model, graphs = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), 0

    def count(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return graph.forward

    call: Any = torch._dynamo.disable(lambda x: model(x), recursive=False)
    run: Any = torch.compile(lambda x: call(x * 2), backend=count)
    with elbowroom.fit(model, [], PLENTY, profile=profile) as room:
        for _ in range(3):
            with room.step():
                run(torch.randn(8, WIDTH)).sum().backward()
    assert graphs == 1


def test_steps_that_begin_and_end_in_compiled_code_are_compiled_as_without_a_room(profile: HardwareProfile) -> None:
    """The optimizer's step ends them. What runs then is not compiled, and the next, plain one is not watched."""

    def train(within: bool) -> int:
        torch._dynamo.reset()
        graphs = 0

        def count(graph: torch.fx.GraphModule, example: object) -> Callable[..., Any]:
            nonlocal graphs
            graphs += 1
            return graph.forward

        @torch.compile(backend=count)
        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        def compute() -> None:  # Dynamo would compile it
            torch.ones(2).sin()

        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        room = open_room(model, optimizer, PLENTY, profile=profile) if within else None
        steps = None if room is None else OptimizerSteps(room, model, [optimizer], after_step=compute)
        for _ in range(6):
            step(torch.randn(8, WIDTH))
        if steps is not None and room is not None:
            room.detach()
            steps.close()
            modes = [record.mode for record in room.journal().steps]
            assert modes[0] is Mode.CAPTURE and modes[-1] is Mode.PLAIN
        return graphs

    assert train(within=True) == train(within=False)


@pytest.mark.usefixtures("no_ample_room")
def test_a_step_that_is_watched_from_a_compiled_call_on_stays_so(profile: HardwareProfile) -> None:
    """Each call of a compiled function puts dispatch keys back as it found them."""
    job = Job("aot_eager", "whole")
    with elbowroom.fit(job.model, [], PLENTY, profile=profile) as room:
        for rows in (8, 8, 8, 16):
            with room.step():
                loss = job.run(torch.randn(rows, WIDTH))
                runner = room._modes.runner
                before = 0 if runner is None else runner.state.watcher.ops
                loss.exp().backward()
        assert runner is not None and runner.state.watcher.ops > before


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_compiled_update_is_that_of_all_parameters(
    is_compiled: bool, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs for some of them each would reach Dynamo's limit, beyond which it runs eagerly, with other bits."""
    grouped = []
    run = GroupedStep._run

    def note(self: GroupedStep, *args: Any) -> Any:
        grouped.append(self)
        return run(self, *args)

    monkeypatch.setattr(GroupedStep, "_run", note)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.step()

    run_step = torch.compile(step, backend="eager") if is_compiled else step
    budget_bytes = 6 * sum(each.nbytes for each in model.parameters())
    with elbowroom.fit(model, optimizer, budget_bytes, mode="dynamic", min_offload_bytes=1024, profile=profile) as room:
        for _ in range(2):
            with room.step():
                model(torch.ones(8, 64)).sum().backward()
                run_step()
                optimizer.zero_grad()
    assert bool(grouped) != is_compiled


def test_the_refusal_of_compiled_code_says_so(profile: HardwareProfile) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.compile(backend="inductor")
    def step() -> None:
        optimizer.step()

    budget_bytes = 3 * sum(each.nbytes for each in model.parameters())
    with elbowroom.fit(model, optimizer, budget_bytes, mode="dynamic", min_offload_bytes=1024, profile=profile) as room:

        def train() -> None:
            model(torch.ones(8, 64)).sum().backward()
            step()

        with pytest.raises(Infeasible, match="leave an optimizer's step uncompiled"), room.step():
            train()
    assert not is_in_region()


def test_code_is_compiled_once_inside_and_outside_of_steps_while_state_is_away(away: Away) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model = torch.compile(away.job.model, backend=backend)

    def evaluate() -> None:
        with torch.no_grad():
            model(make_batch(0))

    evaluate()
    graphs = len(compiled)
    assert graphs
    for _ in range(2):
        away.empty()
        with away.room.step():
            evaluate()
            away.job.step(0)
        away.empty()
        evaluate()
    assert len(compiled) == graphs


class Heard:
    """Keeps what a listener is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    awaits_call, knows_calls = True, False

    def owns(self, modules: Iterable[nn.Module]) -> bool:
        return False

    def before_compiled_call(self, *, is_own: bool) -> None:
        self.told.append("before")

    def switch(self, is_compiled: bool) -> None:
        self.told.append(is_compiled)

    def hear(self, call: Callable[[], object]) -> list[object]:
        """The first and the last that a call tells."""
        self.told.clear()
        call()
        return [*self.told[:2], self.told[-1]] if self.told else []


def test_listeners_are_told_of_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a call ends before its code begins, as on fake tensors."""
    from torch._dynamo import eval_frame

    def refuse(_: object) -> None:
        raise RuntimeError("refused")

    def call_refused() -> None:
        with pytest.raises(RuntimeError, match="refused"):
            call()

    def call_while_handling() -> None:
        try:
            raise ValueError
        except ValueError:
            call()

    inner = torch.compile(lambda x: x + 1, backend="eager")
    outer = torch.compile(lambda x: inner(x) * 2, backend="eager")
    call = functools.partial(outer, torch.ones(2))
    heard = Heard()
    end = listen(heard)
    assert heard.hear(call) == ["before", True, False]
    with monkeypatch.context() as patched:
        patched.setattr(eval_frame, "_callback_from_stance", refuse)
        assert heard.hear(call_refused) == ["before", False, False]
    assert heard.hear(call_while_handling) == ["before", True, False]
    assert heard.hear(call) == ["before", True, False]
    end()
    assert heard.hear(call) == []


def make_compiled(kind: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module, torch.optim.Optimizer]:
    """Return what the loop calls, the model and its optimizer."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
        return model, model, optimizer
    if kind == "model":
        return torch.compile(model, backend="aot_eager"), model, optimizer
    if kind == "partial":
        return torch.compile(functools.partial(model), backend="aot_eager"), model, optimizer
    if kind == "method":
        return torch.compile(Trainer([model]).call, backend="aot_eager"), model, optimizer
    return torch.compile(lambda x: model(x), backend="aot_eager"), model, optimizer


class Trainer:
    """Holds a model in a list."""

    def __init__(self, models: list[nn.Module]) -> None:
        self.models = models

    def call(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.models[0](x)
        return found


models = nn.Linear(1, 1)
"""Has the name of an attribute that `Trainer.call` reads."""


def test_modules_that_a_function_reaches() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    method = Trainer([model]).call
    assert find_modules([method]) == [model]
    assert find_modules([functools.partial(method, other)]) == [other, model]
    assert find_modules([{"net": (model,)}, "text", None]) == [model]
    assert find_modules([lambda: models(model.weight)]) == [model, models]
    assert find_modules([torch.compile(lambda: other, backend="eager")]) == [other]
    assert find_modules([Lazy(model), weakref.proxy(Lazy(other))]) == []


class Lazy(dict[str, nn.Module]):
    """Fails if it is asked for its items or attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.make = lambda: model.weight

    def values(self) -> Any:
        raise AssertionError

    @property
    def __class__(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize("kind", ["blocks", "model", "function", "partial", "method"])
@pytest.mark.parametrize("finds", [True, False], ids=["found", "with"])
def test_a_compiled_call_begins_no_step_of_another_room(kind: str, finds: bool, profile: HardwareProfile) -> None:
    """Each room has the steps of its own job, an evaluation in training mode but without gradients between them."""
    jobs = [make_compiled(kind) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        rooms = [stack.enter_context(elbowroom.fit(*job[1:], PLENTY, profile=profile, mode="dynamic")) for job in jobs]
        for _ in range(4):
            for (call, _, optimizer), room in zip(jobs, rooms, strict=True):
                with contextlib.nullcontext() if finds else room.step():
                    call(torch.randn(ROWS, WIDTH)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    call(torch.randn(ROWS, WIDTH))
        steps = [room.journal().steps for room in rooms]
    assert [len(each) for each in steps] == [4, 4]
    assert len({each.saves for room in steps for each in room}) == 1
