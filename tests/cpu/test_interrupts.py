"""Interrupts: Ctrl-C, and exceptions of signal handlers, at any moment."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import operator
import os
import pathlib
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.native import library
from elbowroom.planner.searching.cores import run_all
from elbowroom.room import Room
from elbowroom.runtime.step_runner import StepRunner
from elbowroom.tiers.disk import SpillFile
from tests.state_jobs import (
    LAYERS,
    PARAMETER_BYTES,
    StateJob,
    adamw,
    assert_same,
    list_tensors,
    make_batch,
    make_model,
)


def wait_after(function: Callable[[], Any]) -> None:
    """Call a function, and wait for an exception that comes after it."""
    function()
    threading.Event().wait(5)


@pytest.fixture
def interrupted() -> Iterator[Callable[[Callable[[], Any]], None]]:
    """Calls a function with Ctrl-C pending, and expects it to be raised afterwards."""

    def call(function: Callable[[], Any]) -> None:
        # In C, as Python looks for signals between two instructions.
        calls = map(operator.call, [ctypes.pythonapi.PyErr_SetInterrupt, function])
        with pytest.raises(KeyboardInterrupt):
            wait_after(functools.partial(collections.deque, calls, maxlen=0))

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield call
    signal.signal(signal.SIGINT, former)


def test_a_saved_tensor_is_given_up(interrupted: Callable[[Callable[[], Any]], None]) -> None:
    retired: collections.deque[tuple[int, None]] = collections.deque()
    calls: list[int] = []
    box = [library.load().PackedTensor(retired.append, lambda: calls.append(len(retired)), 7, None, 0)]
    interrupted(box.clear)
    assert list(retired) == [(7, None)] and calls == [1]


def test_a_callback_of_a_weak_reference(interrupted: Callable[[Callable[[], Any]], None]) -> None:
    box, calls = [Hidden()], list[object]()
    callback = library.load().ShieldedFunction(calls.append)
    reference = weakref.ref(box[0], callback)
    interrupted(box.clear)
    assert calls == [reference]


class Deadline(TimeoutError):
    """Raised by the handler of a signal."""


@pytest.mark.parametrize("budget_bytes", [500_000, 1 << 30])
def test_a_captured_step_goes_on_after_an_interrupt(
    budget_bytes: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extension has counted a save that was never recorded."""
    drain, calls = StepRunner._drain, [0]

    def interrupt(runner: StepRunner) -> None:
        if sys._getframe(1).f_code.co_name == "save":
            calls[0] += 1
            if calls[0] == 5:
                raise Deadline
        drain(runner)

    def train(*, is_managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(64, 64), nn.GELU())))
        optimizer = torch.optim.AdamW(model.parameters())
        room: Any = contextlib.nullcontext()
        if is_managed:
            room = elbowroom.fit(model, optimizer, budget_bytes, min_offload_bytes=1 << 10, profile=profile)
        with room:
            for index in range(6):
                if index == 1 and is_managed:
                    with monkeypatch.context() as patch:
                        patch.setattr(StepRunner, "_drain", interrupt)
                        with pytest.raises(Deadline):
                            model(torch.ones(256, 64))
                model(torch.full((256, 64), float(index))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [each.detach() for each in model.parameters()]

    assert all(map(torch.equal, train(is_managed=False), train(is_managed=True)))


def test_an_interrupt_as_threads_begin_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elbowroom.planner.searching.cores.can_start_threads", lambda: True)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_all([int, int])
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_an_error_of_a_handler_is_no_error_of_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def interrupt(*_args: object) -> None:
        raise Deadline

    file = SpillFile(tmp_path)
    file.reserve(1 << 16)
    with monkeypatch.context() as patch:
        for name in ("posix_fallocate", "ftruncate"):
            patch.setattr(os, name, interrupt)
        with pytest.raises(Deadline):
            file.reserve(1 << 20)
        with pytest.raises(Deadline):
            file.close()


def test_a_call_that_is_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    ignored: list[str] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: ignored.append(str(unraisable.exc_value)))

    def fail(times: int) -> None:
        calls.append(times)
        if len(calls) <= times:
            raise ArithmeticError("of a signal's handler")

    shielded = library.load().ShieldedFunction(fail)
    with pytest.raises(ArithmeticError):
        wait_after(functools.partial(shielded, 1))
    assert calls == [1, 1] and not ignored
    calls.clear()
    shielded(2)
    threading.Event().wait(0.01)  # it would be raised here
    assert calls == [2, 2] and ignored == ["of a signal's handler"]


class Interrupter:
    """Raises `Deadline` at one of the calls of Elbowroom's functions, as a signal's handler may."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: types.FrameType, event: str, _argument: object) -> None:
        if event == "call" and "elbowroom" in frame.f_code.co_filename and frame.f_code.co_filename.find("tests") < 0:
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise Deadline


def interrupt(number: int, function: Callable[[], Any]) -> bool:
    """Call a function, and interrupt one of the calls inside of it. Return whether there were as many."""
    interrupter = Interrupter(number)
    sys.setprofile(interrupter)
    try:
        with contextlib.suppress(Deadline):
            function()
    finally:
        sys.setprofile(None)
    return interrupter.left <= 0


def make_paged_job(profile: HardwareProfile, steps: int) -> tuple[StateJob, Room]:
    """Return a job whose state has left in part, and its room."""
    model = make_model(4)
    job = StateJob(model, [adamw(model.parameters())], lambda _: None)
    room = elbowroom.fit(
        model, job.optimizers, 2 * PARAMETER_BYTES * 4 // LAYERS, profile=profile, min_offload_bytes=1 << 10
    )
    for index in range(steps):
        train(job, index)
    return job, room


def train(job: StateJob, index: int) -> None:
    job.model(make_batch(index)).square().mean().backward()
    job.optimizers[0].step()
    job.optimizers[0].zero_grad()


NUMBERS = [*range(1, 30), *(int(30 * 1.25**power) for power in range(26))]


def test_a_detach_that_is_interrupted_can_be_repeated(profile: HardwareProfile) -> None:
    """At any call inside of it: all state comes back, and nothing stays attached."""
    model = make_model(4)
    plain = StateJob(model, [adamw(model.parameters())], lambda _: None)
    for index in range(4):
        train(plain, index)
    for number in NUMBERS:
        job, room = make_paged_job(profile, 3)
        assert room._pager.count_away()
        was_interrupted = interrupt(number, room.detach)
        room.detach()
        train(job, 3)
        assert_same(list_tensors(plain), list_tensors(job))
        assert not any("_compiled_call_impl" in vars(each) for each in job.model.modules()), number
        if not was_interrupted:
            break
    else:
        pytest.fail("there were more calls")


def test_a_step_that_is_interrupted_is_followed_by_others(profile: HardwareProfile) -> None:
    """At any call as it ends and the next begins."""
    counts = 0
    for number in NUMBERS:
        job, room = make_paged_job(profile, 2)
        before = [each.detach().clone() for each in job.model.parameters()]

        def end_and_begin(job: StateJob = job) -> None:
            job.optimizers[0].step()
            job.model(make_batch(2))

        job.model(make_batch(2)).square().mean().backward()
        was_interrupted = interrupt(number, end_and_begin)
        counts += was_interrupted
        job.optimizers[0].zero_grad()
        with torch.no_grad():
            for each, former in zip(job.model.parameters(), before, strict=True):
                each.copy_(former)
        for index in range(2):
            train(job, index)
        room.detach()
        list_tensors(job)  # all of it is there
        if not was_interrupted:
            break
    assert counts > 40
