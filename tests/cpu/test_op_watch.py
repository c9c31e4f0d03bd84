"""A step is watched without anything else noticing."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from elbowroom.runtime.step_storages import load_native

ROOT = pathlib.Path(__file__).parents[2]


def test_a_step_leaves_nothing_for_the_garbage_collector(profile: HardwareProfile) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.collect()
    gc.disable()
    try:
        with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room:
            runners = []
            for _ in range(3):
                with room.step():
                    model(torch.ones(4, 8)).tanh().sum().backward()
                    runners.append(weakref.ref(room._modes.runner))  # type: ignore[arg-type]
            assert [runner() is None for runner in runners] == [True, True, False]
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


def multiply(x: torch.Tensor) -> torch.Tensor:
    return x.prod(dim=1).sum()


def mask(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(x.masked_fill(x > 0.5, 0.25).square().sum(), x, create_graph=True)
    return gradient.square().sum()


def accumulate(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(x.cumprod(dim=1).sum(), x, create_graph=True)
    return gradient.square().sum()


def decompose(x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(torch.linalg.det(x[:8, :8]), x, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize("program", [multiply, mask, accumulate, decompose])
@pytest.mark.parametrize("mode", ["auto", "dynamic"])
def test_formulas_are_those_of_plain_steps(
    program: Callable[[torch.Tensor], torch.Tensor], mode: str, profile: HardwareProfile
) -> None:
    """PyTorch picks others while a dispatch mode is active, whose results differ in their last bits."""

    def train(room: elbowroom.Room | None) -> list[torch.Tensor]:
        found = []
        for _ in range(4):
            with room.step() if room is not None else contextlib.nullcontext():
                program(model.weight * 1.0).backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.clone())
            model.weight.grad = None
        return found

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    expected = train(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"mode": mode, "min_offload_bytes": 1, "always_watch": True, "profile": profile}
    with elbowroom.fit(model, optimizer, 1 << 30, **options) as room:
        found = train(room)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_a_chain_of_records_takes_no_stack(profile: HardwareProfile) -> None:
    """Each op holds what it read, and that the op that made it."""
    model = nn.Linear(2, 2)
    with elbowroom.fit(model, [], 1 << 30, mode="dynamic", min_offload_bytes=1, profile=profile) as room:
        with room.step():
            x = model.weight * 1.0
            for _ in range(100_000):
                x = x.detach().requires_grad_() * 1.0
        with room.step():
            (model.weight * 1.0).sum().backward()
    assert model.weight.grad is not None


def test_a_forked_process_goes_on_unwatched(profile: HardwareProfile) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, 1 << 30, mode="dynamic", profile=profile) as room, room.step():
        loss = model(torch.ones(4, 8)).sum()
        process = multiprocessing.get_context("fork").Process(target=compute_elsewhere)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        loss.backward()


def compute_elsewhere() -> None:
    if torch._C._is_key_in_tls("elbowroom.watchers"):
        raise SystemExit(3)
    torch.ones(1000).mul_(2).sum()


def test_ops_of_several_threads_have_places_of_their_own(profile: HardwareProfile) -> None:
    """Autograd runs a thread for each device. Two ops at one place would be one in a replay."""
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, [], 1 << 30, **options) as room, room.step():
        runner = room._modes.runner
        assert runner is not None
        native, made = library.load(), list[torch.Tensor]()
        barrier = threading.Barrier(4)

        def compute() -> None:
            native.set_watchers((runner.state.watcher,))
            barrier.wait()
            for _ in range(200):
                made.append(model.weight.detach().sin().cos())
            native.set_watchers(())

        threads = [threading.Thread(target=compute) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        table = runner.state.storages.table
        targets = [runner.state.storages.table.see(each.untyped_storage()) for each in made]
        recordings = [table.find_recording(each.record) for each in targets]
        assert [each.names for each in recordings] == [["aten.sin.default", "aten.cos.default"]] * 800
        places = [place for each in recordings for place in each.places]
        assert len(set(places)) == len(places) == 1600


def test_what_an_op_failed_to_write_is_not_computed_again(profile: HardwareProfile) -> None:
    """Part of it may be written."""
    model = nn.Linear(64, 64)
    with elbowroom.fit(model, [], 1 << 30, mode="dynamic", min_offload_bytes=1, profile=profile) as room, room.step():
        x = model.weight.relu()
        table = room._modes.runner.state.storages.table  # type: ignore[union-attr]
        saved = table.see(x.untyped_storage())
        assert saved.record.ops == ["aten.relu.default"]
        with pytest.raises(RuntimeError, match="The size of tensor"):
            x.add_(torch.ones(3, 5))
        assert saved.record.ops == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_while_other_threads_are_watched(profile: HardwareProfile) -> None:
    """The child goes on with the step, and finds no lock that a thread of its parent's held."""
    model = nn.Linear(64, 64)
    options: dict[str, Any] = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, [], 1 << 30, **options) as room, room.step():
        runner = room._modes.runner
        assert runner is not None
        native, stop = library.load(), threading.Event()

        def compute() -> None:
            native.set_watchers((runner.state.watcher,))
            own = model.weight.detach().requires_grad_()  # nodes have locks of PyTorch's
            while not stop.is_set():
                own.sin().cos().sum().backward()
            native.set_watchers(())

        threads = [threading.Thread(target=compute) for _ in range(2)]
        for each in threads:
            each.start()
        try:
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.alarm(20)
                    torch.set_num_threads(1)  # OpenMP would wait for threads that the child does not have
                    model(torch.ones(4, 64)).sin().sum().backward()
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
            for each in threads:
                each.join()


ENDS = """
import sys
import pytest, torch
import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from tests.pressure import ask_at_every_request

patch = pytest.MonkeyPatch()
ask_at_every_request(patch)
model = torch.nn.Sequential(*(layer for _ in range(3) for layer in (torch.nn.Linear(32, 32), torch.nn.GELU())))
options = {"mode": "dynamic", "policy": "dtr", "min_offload_bytes": 1}
room = elbowroom.fit(model, [], 1 << 40, profile=elbowroom.load(HardwareProfile, sys.argv[1]), **options)
step = room.step()
step.__enter__()
loss = model(torch.randn(64, 32)).square().mean()
print("end")
"""


def test_the_interpreter_ends_inside_a_step(profile: HardwareProfile, tmp_path: pathlib.Path) -> None:
    """What has left stays where it is: the thread that would bring it back is gone."""
    elbowroom.save(profile, tmp_path / "profile.json")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", ENDS, str(tmp_path / "profile.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


class Told:
    """Is told of writes by a watch."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, int]] = []

    def leave(self, why: str) -> None:
        raise AssertionError(why)

    def about_to_write(self, tensor: torch.Tensor) -> None:
        self.writes.append(("before", tensor.data_ptr()))

    def written(self, tensor: torch.Tensor) -> None:
        self.writes.append(("after", tensor.data_ptr()))


def test_an_op_is_watched_alike_with_boxed_arguments_and_without() -> None:
    """They are boxed where more than one watches."""
    native = load_native()
    inputs = torch.randn(4, 4)

    def run(watches: int, *, is_recorded: bool) -> tuple[list[int], list[int], list[str], list[torch.Tensor]]:
        hosts = [Told() for _ in range(watches)]
        tables = [native.StorageTable(None) for _ in hosts]
        made = [native.OpWatch("cpu", table, host) for table, host in zip(tables, hosts, strict=True)]
        x, weight = inputs.clone(), inputs.clone().requires_grad_()
        for table, watch in zip(tables, made, strict=True):
            table.see(x.untyped_storage()).record.is_guarded = True
            if is_recorded:
                watch.record(-1, 0)
        native.set_watchers(tuple(made))
        try:
            y = torch.addmm(x, x, weight).sigmoid().mul(2).transpose(0, 1)[1:].sum(dim=0)
            y.sum().backward()
            x.add_(1).mul_(2)
            with pytest.raises(RuntimeError, match="shape"):
                torch.mm(x, torch.ones(3, 2))
        finally:
            native.set_watchers(())
        assert weight.grad is not None
        order = [when for when, address in hosts[0].writes if address == x.data_ptr()]
        assert all(host.writes == hosts[0].writes for host in hosts)
        return [watch.ops for watch in made], [watch.recorded_ops for watch in made], order, [x, y, weight.grad]

    for is_recorded in (False, True):
        ops, recorded, order, results = run(1, is_recorded=is_recorded)
        boxed_ops, boxed_recorded, boxed_order, boxed_results = run(2, is_recorded=is_recorded)
        assert boxed_ops == ops * 2
        assert boxed_recorded == recorded * 2
        assert (recorded[0] > 0) == is_recorded
        assert order == boxed_order == ["before", "after"] * 2
        assert all(map(torch.equal, results, boxed_results))
