"""Ops are timed in their device's own order, and nobody waits for that."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import elbowroom
from elbowroom.hooks.estimates import Estimates
from elbowroom.hooks.hidden import hide_from_compiler
from elbowroom.hooks.stopwatch import MOST_PENDING, Pace, Stopwatch
from elbowroom.ir.hardware import HardwareProfile


class FakeDevice:
    """Runs what it was given when told to; an op takes as many seconds as its argument says."""

    def __init__(self) -> None:
        self.handed_out, self.done, self.seconds = 0, 0, [0.0]

    def run(self, seconds: float) -> str:
        self.handed_out += 1
        self.seconds.append(self.seconds[-1] + seconds)
        return "result"

    def mark(self) -> FakeMark:
        return FakeMark(self, self.handed_out)


class FakeMark:
    def __init__(self, device: FakeDevice, place: int) -> None:
        self.device, self.place = device, place

    def is_past(self) -> bool:
        return self.device.done >= self.place

    def seconds_since(self, earlier: FakeMark) -> float:
        assert self.is_past(), "asked before the device has got there: that would wait"
        return self.device.seconds[self.place] - self.device.seconds[earlier.place]


def test_the_host_stands_in_until_the_device_has_told() -> None:
    device, pace = FakeDevice(), Pace()
    stopwatch = Stopwatch(device.mark)
    assert stopwatch.time(pace, device.run, (5.0,), {}) == "result"
    assert 0 < pace.seconds < 1
    device.done = 1
    stopwatch.collect()
    assert pace.seconds == 5.0


def test_the_first_run_warms_up() -> None:
    device, pace = FakeDevice(), Pace()
    stopwatch = Stopwatch(device.mark)
    for seconds in (90.0, 1.0, 2.0, 3.0):
        stopwatch.time(pace, device.run, (seconds,), {})
        device.done = device.handed_out
    stopwatch.collect()
    assert pace.begun == Pace.ENOUGH
    assert pace.seconds == pytest.approx(2.0)


def test_a_device_that_is_behind_is_not_asked_more_and_more() -> None:
    device, paces = FakeDevice(), [Pace() for _ in range(2 * MOST_PENDING)]
    stopwatch = Stopwatch(device.mark)
    for pace in paces:
        stopwatch.time(pace, device.run, (2.0,), {})
    assert [pace.begun for pace in paces] == [1] * MOST_PENDING + [0] * MOST_PENDING
    device.done = device.handed_out
    stopwatch.collect()
    assert [pace.seconds for pace in paces] == [2.0] * MOST_PENDING + [0.0] * MOST_PENDING


def test_an_op_that_fails_is_not_timed() -> None:
    def fail() -> None:
        raise ValueError("of the op")

    device, pace = FakeDevice(), Pace()
    with pytest.raises(ValueError, match="of the op"):
        Stopwatch(device.mark).time(pace, fail, (), {})
    assert pace.begun == 0


def test_ops_are_timed_a_few_times_in_a_room(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    time = Stopwatch.time

    def count(stopwatch: Stopwatch, pace: Pace, func: Any, *rest: Any) -> Any:
        asked.append(str(func))
        return time(stopwatch, pace, func, *rest)

    monkeypatch.setattr(Stopwatch, "time", count)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room:
        for _ in range(10):
            with room.step():
                model(torch.ones(4, 8)).tanh().sum().backward()
            assert room._engine.historian.busy_seconds > 0  # type: ignore[union-attr]
    assert asked.count("aten.tanh.default") == Pace.ENOUGH


def test_what_cannot_be_marked_is_not_timed() -> None:
    device, pace = FakeDevice(), Pace()
    assert Stopwatch(lambda: None).time(pace, device.run, (5.0,), {}) == "result"
    assert pace.begun == 0


def test_what_rests_on_values_is_asked_again() -> None:
    estimates = Estimates("cpu")
    func = torch.ops.aten.repeat_interleave.Tensor
    assert estimates.find(func, (torch.tensor([1, 2]),), {}).result_bytes == 64
    assert estimates.find(func, (torch.tensor([1, 1000]),), {}).result_bytes >= 8 * 1001


def test_a_step_leaves_nothing_for_the_garbage_collector(profile: HardwareProfile) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room:
            engines = []
            for _ in range(3):
                with room.step():
                    model(torch.ones(4, 8)).tanh().sum().backward()
                    engines.append(weakref.ref(room._engine))  # type: ignore[arg-type]
            assert [engine() is None for engine in engines] == [True, True, False]
    finally:
        gc.enable()


def test_ops_that_the_dispatcher_does_not_know_pass(profile: HardwareProfile) -> None:
    """A fake tensor is asked for its device by an op like that."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room, room.step():
        with FakeTensorMode():
            nn.Linear(8, 8)(torch.randn(4, 8)).sum().backward()
        model(torch.ones(4, 8)).sum().backward()
    assert model.weight.grad is not None


def test_a_watcher_is_not_compiled() -> None:
    """Even where a compiled function has fallen back to Python, in which the watcher is called."""
    graphs: list[Any] = []

    def compile_nothing(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def do_more(result: torch.Tensor) -> torch.Tensor:
        return torch.ones(3) + result.numel()

    class Watching(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            do_more(result)
            return result

        is_hidden = hide_from_compiler(__torch_dispatch__)

    def compute(x: torch.Tensor) -> torch.Tensor:
        with Watching():
            y = x * 2
            torch._dynamo.graph_break()
            return y.sin()

    if Watching.is_hidden:
        torch.compile(compute, backend=compile_nothing)(torch.ones(4))
        assert not graphs
