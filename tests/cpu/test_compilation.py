"""After `elbowroom build` nothing is compiled in a user's step."""

from __future__ import annotations

import functools
import pathlib
import subprocess
import sys

import pytest
import torch

import elbowroom
from elbowroom import _numba_loops, plan_cache
from elbowroom._numba_loops import IS_COMPILED
from elbowroom.ir.hardware import HardwareProfile

AHEAD = """
import collections
from numba.core import event
from elbowroom import plan
from elbowroom.compilation import compile_loops
from elbowroom.ir.buffers import Buffer
from elbowroom.layout.lay_out import lay_out, list_allocators
from elbowroom.planner.problem import pose
from elbowroom.simulator.planned import PreparedTrace
from tests.generators import make_chain, make_costs, make_link, make_residual_net

stages = []
compile_loops(lambda what, share: stages.append(share))
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


@pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed")
def test_what_is_compiled_ahead_is_all_there_is() -> None:
    done = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


@pytest.mark.parametrize(("mode", "is_kept", "count"), [("auto", False, 1), ("auto", True, 0), ("dynamic", False, 0)])
def test_fit_says_once_that_the_first_plan_will_compile(
    mode: str, is_kept: bool, count: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(plan_cache, "IS_COMPILED", True)
    monkeypatch.setattr(plan_cache, "is_kept", lambda: is_kept)
    monkeypatch.setattr(plan_cache, "_warn_of_compiling", functools.cache(plan_cache._warn_of_compiling.__wrapped__))
    model = torch.nn.Linear(4, 4)
    for _ in range(2):
        elbowroom.fit(model, torch.optim.SGD(model.parameters()), "1GiB", mode=mode, profile=profile).detach()
    said = [record for record in caplog.records if "`elbowroom build` does that ahead" in record.message]
    assert [record.levelname for record in said] == ["WARNING"] * count


def test_machine_code_of_before_is_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_numba_loops, "_find_cache", lambda: str(tmp_path / "compiled"))
    assert not _numba_loops.is_kept()
    (tmp_path / "compiled" / "planner").mkdir(parents=True)
    (tmp_path / "compiled" / "planner" / "annealing.anneal-1.nbi").touch()
    assert _numba_loops.is_kept()
