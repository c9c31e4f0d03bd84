"""PyTorch's callbacks for ops (`RecordFunction`) in steps whose state may leave memory.

PyTorch does not call them for the ops of a watched step while ours is the only one, except inside ops of the program.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from elbowroom.hooks.compiled_regions import stay_watched
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.native import library
from tests.state_jobs import (
    BUDGET,
    EVERYTHING,
    STEPS,
    StateJob,
    adamw,
    assert_same,
    fit,
    get_pager,
    make_batch,
    make_job,
    make_model,
    run_plain,
    run_within,
)

USED: list[torch.Tensor] = []
"""What an op of the program uses beside its arguments."""


@torch.library.custom_op("elbowroom_tests::scale_by_used", mutates_args=())
def scale_by_used(x: torch.Tensor) -> torch.Tensor:
    """An op that reads tensors that it is not given, and needs memory in between."""
    with torch.no_grad():
        for each in USED:
            x = x + (each.repeat(4, 1) @ each).sum() / each.numel() ** 2
    return x.clone()


scale_by_used.register_autograd(lambda _, gradient: gradient)


class WithAnOpOfItsOwn(nn.Sequential):
    """Calls an op that reads its weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        USED[:] = [each.weight for each in self.modules() if isinstance(each, nn.Linear)]
        x = super().forward(x)
        x = x + scale_by_used(x)
        USED.clear()
        return x


def make_job_with_an_op_of_its_own() -> StateJob:
    return make_job(adamw, WithAnOpOfItsOwn(*make_model()))


@pytest.mark.parametrize("is_metered", [True, False])
@pytest.mark.parametrize(
    ("mode", "is_heard"),
    [("dynamic", False), ("auto", False), pytest.param("dynamic", True, id="Dynamo tells us of the op's function")],
)
def test_an_op_uses_state_that_it_is_not_given(
    mode: str, is_heard: bool, is_metered: bool, profile: HardwareProfile
) -> None:
    if is_heard:
        stay_watched()
    found = run_within(make_job_with_an_op_of_its_own, profile, mode=mode, is_metered=is_metered)
    assert_same(run_plain(make_job_with_an_op_of_its_own), found)


@torch.library.custom_op("elbowroom_tests::add_used_beside_much", mutates_args=())
def add_used_beside_much(x: torch.Tensor) -> torch.Tensor:
    """An op that takes nearly the whole budget, and reads a tensor that it is not given."""
    much = torch.empty(BUDGET // 4 - 2000)
    return x + USED[0].sum() + much.numel()


@pytest.mark.parametrize("make_context", [contextlib.nullcontext, torch.profiler.profile])
def test_an_op_uses_state_for_which_there_is_no_room(make_context: Any, profile: HardwareProfile) -> None:
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(3):
            with room.step():
                job.step(index)
        USED[:] = [next(job.model.parameters()).detach()]
        get_pager(room).make_room(EVERYTHING)
        with make_context(), pytest.raises(RuntimeError, match="Elbowroom has moved these bytes"), room.step():
            add_used_beside_much(torch.ones(2))
        USED.clear()


def count_ops(seen: Any) -> Counter[str]:
    ours = ("aten::copy_", "aten::empty", "aten::empty_strided", "aten::to", "aten::_to_copy", "aten::set_")
    names = Counter({each.key: each.count for each in seen.key_averages()})
    return Counter({name: count for name, count in names.items() if name.startswith("aten::") and name not in ours})


def profile_all() -> Any:
    return torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True, with_modules=True)


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("make_profiler", [torch.autograd.profiler.profile, torch.profiler.profile, profile_all])
def test_profilers_see_every_op(
    make_profiler: Callable[[], Any], mode: str, profile: HardwareProfile, capfd: pytest.CaptureFixture[str]
) -> None:
    """Around a step, in its middle, and after it. Of those in the middle, a first composite one may be missed."""
    plain, job = make_job(adamw), make_job(adamw)
    for index in range(STEPS):
        plain.step(index)
    with make_profiler() as seen:
        plain.step(0)
    expected = count_ops(seen)
    assert expected["aten::addmm"] and expected["aten::lerp_"] + expected["aten::_foreach_lerp_"]
    with fit(job, profile, mode=mode) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        for around, inside in [(make_profiler(), room.step()), (room.step(), make_profiler())]:
            with around as first, inside as second:
                job.step(0)
            found = count_ops(second if first is None else first)
            less = expected - found
            assert less.total() <= (1 if first is None else 0), less
        assert room.journal().steps[-1].mode is (Mode.PLANNED if mode == "auto" else Mode.DYNAMIC)
        assert room.journal().steps[-1].reloaded_bytes
        with make_profiler() as seen, torch.no_grad():
            job.model(make_batch(0))
        assert count_ops(seen)["aten::addmm"] == expected["aten::addmm"]
        get_pager(room).make_room(EVERYTHING)
        weight = next(job.model.parameters())
        with pytest.raises(RuntimeError, match="Elbowroom has moved these bytes"):
            torch.from_dlpack(torch._C._to_dlpack(weight.detach()))
    assert "has moved these bytes" not in capfd.readouterr().err


@pytest.mark.parametrize("is_around", [True, False])
def test_a_callback_of_all_threads_sees_every_op(
    is_around: bool, profile: HardwareProfile, tmp_path: pathlib.Path
) -> None:
    """Where it begins in the middle of a step, all but the first 32: those of the backward pass, at any rate."""
    file, job = tmp_path / "trace.json", make_job(adamw)
    with fit(job, profile) as room, contextlib.ExitStack() as stack:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        observer = torch.profiler.ExecutionTraceObserver().register_callback(str(file))
        stack.callback(observer.cleanup)
        with contextlib.nullcontext() if is_around else room.step():
            observer.start()
            with room.step() if is_around else contextlib.nullcontext():
                job.step(0)
            observer.stop()
        assert get_pager(room).storages.reloaded_bytes
    names = Counter(node["name"] for node in json.loads(file.read_text())["nodes"])
    layers = sum(isinstance(each, nn.Linear) for each in job.model.modules())
    assert names["aten::mm"] == 2 * layers - 1
    if is_around:
        assert names["aten::addmm"] == layers


@torch.library.custom_op("elbowroom_tests::add_compiled", mutates_args=())
def add_compiled(x: torch.Tensor) -> torch.Tensor:
    """An op that compiles what it runs."""
    return torch.compile(lambda x: x + 1, backend="eager")(x)


def test_callbacks_are_called_again_after_a_step_that_compiles(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first compilation of a process has PyTorch call them from the middle of an op on."""
    monkeypatch.setattr("elbowroom.hooks.op_dispatch.may_run_compiled", lambda: False)
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(3):
            with room.step():
                job.step(index)
        with room.step():
            job.step(3)
            get_pager(room).make_room(EVERYTHING)
            made = add_compiled(torch.ones(2))  # the last op of the step
        assert made.tolist() == [2.0, 2.0]
        with torch.autograd.profiler.profile() as seen:
            torch.ones(3).add(1)
    assert "aten::add" in count_ops(seen)


def test_a_program_that_has_switched_callbacks_off_keeps_them_off(profile: HardwareProfile) -> None:
    switch = torch._C._autograd._enable_record_function
    make = functools.partial(make_job, adamw)
    expected = run_plain(make)
    switch(False)
    try:
        assert_same(expected, run_within(make, profile, is_metered=False))
        with torch.autograd.profiler.profile() as seen:
            make_batch(0).sum()
        assert not seen.key_averages()
    finally:
        switch(True)


def test_a_step_that_ends_in_a_backward_pass_leaves_nothing_behind(profile: HardwareProfile) -> None:
    """When the pass ends, autograd restores what the thread had when it began, which was in the step."""
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(3):
            with room.step():
                job.step(index)
        with contextlib.ExitStack() as stack:
            stack.enter_context(room.step())
            ended = next(job.model.parameters()).register_post_accumulate_grad_hook(lambda _: stack.close())
            job.model(make_batch(0)).square().mean().backward()
        ended.remove()
        get_pager(room).make_room(EVERYTHING)
        with torch.no_grad():
            job.model(make_batch(0))
        assert not library.load().get_watchers()
