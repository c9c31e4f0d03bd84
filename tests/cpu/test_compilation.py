"""After `elbowroom build` nothing is compiled in a user's step."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numba
import pytest
import torch

import elbowroom
from elbowroom import _numba_loops, compilation, step_planner
from elbowroom.compilation import LoopCompiler
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import pose


def follow_processes(monkeypatch: pytest.MonkeyPatch, code: str) -> list[subprocess.Popen[bytes]]:
    """The processes that are started to compile, each of which runs `code` instead."""
    started: list[subprocess.Popen[bytes]] = []
    inner = compilation._start

    def start(code: str, **options: bool) -> subprocess.Popen[bytes] | None:
        process = inner(code, **options)
        if process is not None:
            started.append(process)
        return process

    monkeypatch.setattr(compilation, "ALL", code)
    monkeypatch.setattr(compilation, "_start", start)
    return started


AHEAD = """
import collections
from numba.core import event
from elbowroom import plan
from elbowroom._numba_loops import is_complete
from elbowroom.compilation import compile_loops
from elbowroom.ir.buffers import Buffer
from elbowroom.layout.lay_out import lay_out, list_allocators
from elbowroom.planner.problem import pose
from elbowroom.simulator.planned import PreparedTrace
from tests.generators import make_chain, make_costs, make_link, make_residual_net

stages = []
compile_loops(lambda what, share: stages.append(share))
assert is_complete()
assert stages == sorted(stages) and 0 <= stages[0] and stages[-1] < 1, stages

class Compiled(event.Listener):
    def on_start(self, told):
        print("compiled", told.data["dispatcher"].py_func.__qualname__, told.data["args"])
    def on_end(self, told):
        pass

event.register("numba:compile", Compiled())
steps = (make_residual_net(6, 1 << 20), make_chain([1 << 20] * 4))
for trace in steps:
    for has_disk in (False, True):
        disk = make_link(per_second=1e8) if has_disk else None
        costs = make_costs(trace, disk=disk)
        least, most = (each.peak_bytes for each in (pose(trace, costs, 1).floor, pose(trace, costs, 1).plain))
        strategies = ("auto", "home_pso", "exact" if trace is steps[1] else "capuchin")
        for strategy in strategies:
            host_bytes = 1 << 30 if not has_disk else 3 << 20
            made = plan(trace, costs, (least + most) // 2, strategy=strategy, host_bytes=host_bytes)
            PreparedTrace(trace, costs, host_bytes=host_bytes).place(made)
buffers = [Buffer(id=i, lower=i % 7, upper=i % 7 + 1 + i % 5, nbytes=1000 + 37 * i) for i in range(50)]
wrapping = Buffer(id=50, lower=11, upper=1, nbytes=5000)
for allocator in set(list_allocators()) - {"omnimalloc"}:
    lay_out(buffers, allocator)
    lay_out(buffers, allocator, capacity_bytes=1 << 30)
lay_out([*buffers, wrapping])
print("done")
"""


def test_what_is_compiled_ahead_is_all_there_is() -> None:
    done = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.parametrize(
    ("mode", "is_complete", "count"), [("auto", False, 1), ("auto", True, 0), ("dynamic", False, 0)]
)
def test_a_room_compiles_in_a_process_of_its_own(
    mode: str, is_complete: bool, count: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = follow_processes(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(_numba_loops, "is_complete", lambda: is_complete)
    model = torch.nn.Linear(4, 4)
    room = elbowroom.fit(model, torch.optim.SGD(model.parameters()), "1GiB", mode=mode, profile=profile)
    with room.step():  # which fits as it is, so that nothing waits
        model(torch.ones(2, 4)).sum().backward()
    assert [process.poll() for process in started] == [None] * count
    room.detach()
    assert [process.returncode for process in started] == [-signal.SIGTERM] * count


def test_the_first_plan_waits_for_what_compiles(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    done = tmp_path / "done"
    started = follow_processes(monkeypatch, f"import pathlib, time; time.sleep(1); pathlib.Path({str(done)!r}).touch()")
    monkeypatch.setattr(_numba_loops, "is_complete", lambda: False)
    was_done: list[bool] = []
    inner = step_planner.make_plan

    def make_plan(*args: Any, **kwargs: Any) -> Plan:
        was_done.append(done.exists())
        return inner(*args, **kwargs)

    monkeypatch.setattr(step_planner, "make_plan", make_plan)
    model = torch.nn.Sequential(*(each for _ in range(4) for each in (torch.nn.Linear(256, 256), torch.nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1024, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = elbowroom.capture(step, model, optimizer)
    problem = pose(trace, elbowroom.price(trace, profile), 1)
    budget = (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2
    elbowroom.fit(model, optimizer, budget, step=step, profile=profile).detach()
    assert was_done == [True]
    assert [process.returncode for process in started] == [0]


def test_a_plan_waits_for_no_more_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; print(0.2, 'one', flush=True); time.sleep(1); print(0.6, 'two', flush=True); time.sleep(60)"
    started = follow_processes(monkeypatch, code)
    monkeypatch.setattr(_numba_loops, "is_complete", lambda: False)
    loops, begin = LoopCompiler(), time.perf_counter()
    for _ in range(2):
        loops.wait(share=0.6)
        assert 1 < time.perf_counter() - begin < 30 and started[0].poll() is None
    assert loops.is_pending
    monkeypatch.setattr(compilation, "LONGEST_WAIT_SECONDS", 0.1)
    loops.wait()
    assert not loops.is_pending and started[0].returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(3)", 3), ("import time; time.sleep(60)", -signal.SIGTERM)]
)
def test_what_fails_to_compile_ahead_is_not_waited_for(code: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started = follow_processes(monkeypatch, code)
    monkeypatch.setattr(_numba_loops, "is_complete", lambda: False)
    monkeypatch.setattr(compilation, "LONGEST_WAIT_SECONDS", 0.5 if status < 0 else 60.0)
    LoopCompiler().wait()
    assert [process.returncode for process in started] == [status]


@pytest.mark.parametrize("trouble", [OSError("no more processes"), PermissionError()])
def test_a_room_works_where_no_process_can_be_started(trouble: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise trouble

    monkeypatch.setattr(_numba_loops, "is_complete", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    LoopCompiler().wait()


IN_A_FORK = """
import os, sys
from elbowroom import _numba_loops, compilation
_numba_loops.is_complete = lambda: False
compilation.ALL = "import time; time.sleep(60)"
compiler = compilation.LoopCompiler()
process = compiler._process
if os.fork() == 0:
    compiler.wait()  # returns at once: this is not its process
    sys.exit(0)      # and neither does the end of this interpreter end it
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert process.poll() is None
print(process.pid)
"""


def test_the_process_ends_with_the_interpreter_and_not_with_a_fork_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_FORK], capture_output=True, text=True, timeout=50, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


def test_one_process_at_a_time_compiles(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numba_loops, "_find_cache", lambda: str(tmp_path / "compiled"))
    order: list[str] = []

    def wait() -> None:
        with _numba_loops.locking_cache():
            order.append("second")

    other = threading.Thread(target=wait)
    with _numba_loops.locking_cache():
        other.start()
        other.join(0.2)
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]


def test_machine_code_counts_as_complete_for_what_it_was_made_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_numba_loops, "_find_cache", lambda: str(tmp_path / "compiled"))
    assert not _numba_loops.is_complete()
    _numba_loops.note_complete()
    assert _numba_loops.is_complete()
    loops = tmp_path / "loops.py"
    loops.touch()
    monkeypatch.setattr(_numba_loops, "_list_files", lambda: (loops,))
    _numba_loops.note_complete()
    assert _numba_loops.is_complete()
    os.utime(loops, (1, 1))  # numba would compile it anew
    assert not _numba_loops.is_complete()
    _numba_loops.note_complete()
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert not _numba_loops.is_complete()


def test_nothing_is_noted_where_nothing_can_be_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(_numba_loops, "_find_cache", lambda: str(file / "compiled"))
    with _numba_loops.locking_cache():
        _numba_loops.note_complete()
    assert not _numba_loops.is_complete()
