"""Model state that has left memory, and what is beside the thread that trains: threads, processes, whole classes."""

from __future__ import annotations

import _thread
import contextlib
import os
import pathlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.runtime import other_threads
from elbowroom.runtime.other_threads import may_look
from tests.state_jobs import (
    BUDGET,
    EVERYTHING,
    PARAMETER_BYTES,
    WIDTH,
    Away,
    adamw,
    assert_same,
    fit,
    get_pager,
    list_tensors,
    make_batch,
    make_job,
    make_model,
)


def run_in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return found[0]


def test_other_threads(away: Away) -> None:
    weight, twin = away.parameter, away.twin
    x = make_batch(0)
    with torch.no_grad():
        assert torch.equal(run_in_thread(lambda: weight.detach() + 1), twin + 1)
        away.empty()
        assert run_in_thread(lambda: weight.tolist()) == twin.tolist()
        away.empty()
        assert torch.equal(run_in_thread(lambda: torch.no_grad()(away.job.model)(x)), away.plain.model(x))
        away.empty()
        for each in (weight, twin):
            run_in_thread(lambda each=each: each.data.mul_(2))
        get_pager(away.room).make_room(EVERYTHING)
        assert torch.equal(weight, twin)
    away.train_on()


def test_no_copy_begins_while_an_access_may_write(away: Away) -> None:
    """The copy could miss what is written, and would pass for the present contents."""
    pager, storage = get_pager(away.room), away.parameter.untyped_storage()
    access = pager.hold_storage(storage, is_written=True, is_lasting=False)
    copied_bytes = pager.storages.offloaded_bytes
    pager.storages.begin_copy(storage)
    pager.storages.release(storage)
    assert pager.storages.table.find(storage).is_written
    assert pager.storages.offloaded_bytes == copied_bytes and not pager.is_away(storage)
    del access
    pager.storages.release(storage)
    assert pager.is_away(storage)
    away.train_on()


def test_threads_that_compute_while_state_leaves_and_returns(profile: HardwareProfile) -> None:
    """A frozen part of the model is read by other threads all the time."""
    job = make_job(adamw, nn.Sequential(make_model(), *make_model()))
    frozen = job.model[0].requires_grad_(False)
    x = make_batch(0, 64)
    with torch.no_grad():
        expected = frozen(x)
    wrong: list[Any] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                with torch.no_grad():
                    if not torch.equal(frozen(x), expected):
                        wrong.append("other contents")
        except BaseException as error:
            wrong.append(error)

    with fit(job, profile, 2 * PARAMETER_BYTES) as room:
        with room.step():
            job.step(0)
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for index in range(1, 12):
                with room.step():
                    job.step(index)
        finally:
            is_over.set()
            for thread in threads:
                thread.join(60)
        assert not wrong
        assert get_pager(room).storages.reloaded_bytes > 12 * PARAMETER_BYTES
        found = list_tensors(job)
    plain = make_job(adamw, nn.Sequential(make_model(), *make_model()))
    plain.model[0].requires_grad_(False)
    for index in range(12):
        plain.step(index)
    assert_same(found, list_tensors(plain))


@pytest.mark.parametrize("is_released", [True, False])
def test_a_step_waits_for_ops_of_other_threads(away: Away, monkeypatch: pytest.MonkeyPatch, is_released: bool) -> None:
    """What they use cannot leave. If they do not end, the step is refused in the end."""
    monkeypatch.setattr(other_threads, "LONGEST_WAIT_SECONDS", 60.0 if is_released else 0.3)
    pager = get_pager(away.room)
    held: list[Any] = []

    def hold() -> None:
        for storage in [tensor.untyped_storage() for tensor in away.job.model.parameters()]:
            held.append(pager.hold_storage(storage, is_written=False, is_lasting=False))

    run_in_thread(hold)
    timer = threading.Timer(0.3, held.clear)
    try:
        if is_released:
            timer.start()
        with away.room.step(), pytest.raises(Infeasible) if not is_released else contextlib.nullcontext():
            guard = away.room._modes.runner._guard
            begin = time.monotonic()
            with pytest.raises(Infeasible):  # as for a reload that can be repeated later
                guard.evict(BUDGET, BUDGET, "a reload", waits=False)
            assert held
            pager.storages.require(BUDGET - PARAMETER_BYTES // 2, torch.device("cpu"))
        assert time.monotonic() - begin >= 0.25
    finally:
        timer.cancel()
        held.clear()


def fork_and(call: Callable[[], Any]) -> str:
    """Return what a forked process finds, as text."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writes, text.encode())
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_forked_processes(away: Away) -> None:
    weight, twin = away.parameter, away.twin
    assert "before this process was forked" in fork_and(lambda: weight.detach().sum().item())
    assert "before this process was forked" in fork_and(weight.tolist)
    assert "before this process was forked" in fork_and(away.room.detach)
    weight.sum()
    assert fork_and(lambda: weight.sum().item()) == str(twin.sum().item())
    away.train_on()


def test_forks_while_other_threads_compute(away: Away) -> None:
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            away.parameter.detach().sum()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(20):
            assert fork_and(lambda: (torch.ones(3) * 2).sum().item()) == "6.0"
    finally:
        is_over.set()
        thread.join()
    away.train_on()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return make_batch(index)


def test_workers_of_data_loaders(away: Away) -> None:
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=2, multiprocessing_context="fork")
    for batch in loader:
        with away.room.step():
            loss = away.job.model(batch).square().mean()
            loss.backward()
            away.job.optimizers[0].step()
            away.job.optimizers[0].zero_grad()
    away.room.detach()
    for index in range(4):
        away.plain.step(index)
    assert_same(list_tensors(away.job), list_tensors(away.plain))


def test_ops_that_go_on_after_they_return(away: Away, tmp_path: pathlib.Path) -> None:
    """What another thread of a process group works on stays in memory."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        work = distributed.all_reduce(away.parameter.data, async_op=True)
        assert get_pager(away.room).make_room(EVERYTHING) >= 0
        assert not get_pager(away.room).is_away(away.parameter.untyped_storage())
        work.wait()
    finally:
        distributed.destroy_process_group()
    assert torch.equal(away.parameter, away.twin)


def test_ops_in_python_that_use_state_beside_their_arguments(away: Away) -> None:
    with torch.library._scoped_library("elbowroom_tests", "FRAGMENT") as library:
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x: x * away.parameter.detach(), "CPU")
        found = torch.ops.elbowroom_tests.scaled(torch.ones(WIDTH, WIDTH))
    assert torch.equal(found, away.twin)


def test_each_method_without_arguments() -> None:
    """In a process of its own, which a method could end."""
    found = subprocess.run(
        [sys.executable, "-m", "tests.state_sweep"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    lines = found.stdout.splitlines()
    assert found.returncode == 0, (lines[-1:], found.stderr[-2000:])
    for kind in ("Tensor.", "UntypedStorage.", "TypedStorage."):
        assert sum(line.startswith(kind) for line in lines) > 50
    assert [line for line in lines if not line.endswith(": the same")] == []


def test_gradients_leave_in_a_thread_of_autograd(profile: HardwareProfile) -> None:
    """On CUDA a backward pass runs there, and all gradients together are larger than the budget."""

    def run_steps(room: Any, job: Any) -> None:
        for index in range(3):
            with contextlib.nullcontext() if room is None else room.step():
                loss = job.model(make_batch(index)).square().mean()
                error = run_in_thread(loss.backward)
                assert error is None, error
                job.optimizers[0].step()
                job.optimizers[0].zero_grad()

    plain, job = (make_job(lambda each: torch.optim.SGD(each, lr=0.1), make_model()) for _ in range(2))
    run_steps(None, plain)
    budget_bytes = int(0.75 * PARAMETER_BYTES)
    with fit(job, profile, budget_bytes) as room:
        run_steps(room, job)
        peaks = [(each.peak_bytes or 0) / budget_bytes for each in room.journal().steps]
        assert max(peaks) <= 1, peaks
        assert_same(list_tensors(job), list_tensors(plain))


def test_callbacks_of_a_backward_pass_may_list_what_the_step_holds() -> None:
    """A thread that Python does not know calls back, as those of collectives do, while the engine computes."""
    weight = torch.randn(1500, 1500, requires_grad=True)
    thread = threading.get_ident()
    answers: list[bool] = []
    has_ended, may_end = threading.Event(), threading.Event()

    def call_back() -> None:
        while not may_end.is_set():
            answers.append(may_look(thread))
            time.sleep(1e-4)
        has_ended.set()

    y = weight
    for _ in range(4):
        y = y @ weight
    _thread.start_new_thread(call_back, ())
    while not answers:
        time.sleep(1e-3)
    assert not any(answers), "the thread of the step runs Python"
    threads = threading.Thread(target=lambda: answers.append(may_look(thread)))
    y.sum().backward()
    may_end.set()
    has_ended.wait()
    assert any(answers)
    before = len(answers)
    threads.start()
    threads.join()
    assert answers[before:] == [False], "a thread of the program's own"
