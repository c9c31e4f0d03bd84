"""Model state survives errors, full disks, detached and dropped rooms, and the end of the process."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from elbowroom.errors import Infeasible, TierFull, TransferFailed
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.tiers.disk import SpillFile
from tests.state_jobs import (
    BUDGET,
    PARAMETER_BYTES,
    StateJob,
    adamw,
    assert_same,
    fit,
    get_pager,
    list_tensors,
    make_batch,
    make_job,
    run_plain,
    run_within,
)

EVERYTHING = 1 << 40


def list_changed(job: StateJob) -> dict[str, torch.Tensor]:
    """Copies of what steps change, without gradients, which a failed step may leave."""
    return {what: each for what, each in list_tensors(job).items() if not what.startswith("gradient")}


def list_states(steps: int) -> list[dict[str, torch.Tensor]]:
    """What a plain job has after each number of steps."""
    job = make_job(adamw)
    found = [list_changed(job)]
    for index in range(steps):
        job.step(index)
        found.append(list_changed(job))
    return found


class Interrupted(BaseException):
    """Stands for Ctrl-C, which some test runners take for theirs."""


def fail(*_: Any) -> None:
    raise Interrupted


def fail_forward(job: StateJob) -> Callable[[], None]:
    return next(iter(job.model.children())).register_forward_pre_hook(fail).remove


def fail_backward(job: StateJob) -> Callable[[], None]:
    return next(job.model.parameters()).register_hook(fail).remove


def fail_after_update(job: StateJob) -> Callable[[], None]:
    return job.optimizers[0].register_step_post_hook(fail).remove


@pytest.mark.parametrize(
    ("fail_in", "steps"),
    [(fail_forward, 2), (fail_backward, 2), (fail_after_update, 3)],
    ids=["forward", "backward", "update"],
)
def test_an_error_in_a_step(
    fail_in: Callable[[StateJob], Callable[[], None]], steps: int, profile: HardwareProfile
) -> None:
    states = list_states(3)
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(2):
            with room.step():
                job.step(index)
        stop = fail_in(job)
        with pytest.raises(Interrupted), room.step():
            job.step(2)
        stop()
        assert_same(list_changed(job), states[steps])
        job.optimizers[0].zero_grad()
        if steps == 2:
            with room.step():
                job.step(2)
        get_pager(room).make_room(EVERYTHING)
    assert_same(list_changed(job), states[3])


@pytest.mark.parametrize("request_number", [1, 5, 20, 40, 60, 80])
def test_memory_that_is_refused(request_number: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a state's return, in whatever part of the step: each parameter has its old or its new values."""
    states = list_states(3)
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(2):
            with room.step():
                job.step(index)
        transfers, count = room._transfers, 0
        reload = transfers.reload

        def reload_or_fail(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == request_number:
                raise TransferFailed("there is no memory")
            return reload(*arguments)

        monkeypatch.setattr(transfers, "reload", reload_or_fail)
        with pytest.raises(TransferFailed, match="no memory"), room.step():
            job.step(2)
        found = list_changed(job)
        assert_each_old_or_new(found, states[2], states[3])
        get_pager(room).make_room(EVERYTHING)
        assert_same(list_changed(job), found)
    assert_same(list_changed(job), found)


def assert_each_old_or_new(
    found: dict[str, torch.Tensor], old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]
) -> None:
    parameters = [what for what in found if not what.startswith("optimizer")]
    for position, name in enumerate(parameters):
        prefix = f"optimizer 0, parameter {position}, "
        names = [name, *(what for what in found if what.startswith(prefix))]
        assert len(names) == 4
        are_old, are_new = ([torch.equal(found[each], state[each]) for each in names] for state in (old, new))
        assert all(are_old) or all(are_new), name


@pytest.mark.parametrize("write_number", [1, 10, 30, 50])
def test_a_disk_that_fails_when_it_is_written_to(
    write_number: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What could not be written stays in memory. If that leaves too little, the step is refused, and says why."""
    states = list_states(3)
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(2):
            with room.step():
                job.step(index)
        count = 0
        write = SpillFile.write

        def write_or_fail(*args: Any) -> None:
            nonlocal count
            count += 1
            if count >= write_number:
                raise OSError(errno.EIO, "broken")
            write(*args)

        with monkeypatch.context() as broken:
            broken.setattr(SpillFile, "write", write_or_fail)
            with pytest.raises((Infeasible, TransferFailed), match="broken"), room.step():
                job.step(2)
        found = list_changed(job)
        assert_each_old_or_new(found, states[2], states[3])
    assert_same(list_changed(job), found)
    assert sum("model state stay in memory" in each for each in caplog.messages) == 1
    caplog.clear()  # tracebacks, which keep the step


def test_a_disk_that_fails_when_it_is_read(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    states = list_states(2)
    job = make_job(adamw)
    room = fit(job, profile)
    for index in range(2):
        with room.step():
            job.step(index)
    get_pager(room).make_room(EVERYTHING)
    weight = list(job.model.parameters())[2]

    def fail_to_read(*args: Any) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as broken:
        broken.setattr(SpillFile, "read", fail_to_read)
        for access in (weight.tolist, lambda: weight + 1, lambda: weight.data_ptr(), room.detach):
            with pytest.raises(TransferFailed, match="broken"):
                access()
    room.detach()
    assert_same(list_changed(job), states[2])


@pytest.mark.parametrize("host_bytes", [0, PARAMETER_BYTES])
def test_too_little_room_below(host_bytes: int, profile: HardwareProfile) -> None:
    states = list_states(1)
    job = make_job(adamw)
    with fit(job, profile, host_bytes=host_bytes) as room:
        with pytest.raises((Infeasible, TierFull), match=r"spill file.* has no room"), room.step():
            job.step(0)
        assert_each_old_or_new_or_absent(list_changed(job), states)


def test_too_little_room_below_for_an_update(profile: HardwareProfile) -> None:
    job = make_job(adamw)
    with fit(job, profile, host_bytes=14 * PARAMETER_BYTES // 5) as room:  # noqa: SIM117
        with pytest.raises(TierFull) as caught, room.step():
            job.step(0)
    state = job.optimizers[0].state
    assert 0 < sum(float(each["step"]) for each in state.values()) < len(list(job.model.parameters()))
    assert any("some parameters may be updated" in each for each in caught.value.__notes__)


@pytest.mark.parametrize("host_parts", [2, 3])
def test_a_smaller_budget_needs_room_below(host_parts: int, profile: HardwareProfile) -> None:
    """It is refused before a step begins, and the job goes on within the former one."""
    job = make_job(adamw)
    host_bytes, budget_bytes = host_parts * PARAMETER_BYTES, 11 * PARAMETER_BYTES // 5
    with fit(job, profile, 6 * PARAMETER_BYTES, mode="auto", host_bytes=host_bytes) as room:
        for index in range(7):
            if index == 4 and host_parts == 2:
                with pytest.raises(Infeasible, match=r"in the tier below the device: the plan needs .* there"):
                    room.set_budget(budget_bytes)
            elif index == 4:
                room.set_budget(budget_bytes)
            with room.step():
                job.step(index)
    plain = make_job(adamw)
    for index in range(7):
        plain.step(index)
    assert_same(list_tensors(job), list_tensors(plain))


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
def test_copies_of_what_is_in_memory_are_given_up(mode: str, profile: HardwareProfile) -> None:
    """Those of all state, and of the activations beside it, have no room below."""
    found = run_within(
        lambda: make_job(adamw), profile, is_metered=False, mode=mode, host_bytes=37 * PARAMETER_BYTES // 10
    )
    assert_same(found, run_plain(lambda: make_job(adamw)))


def assert_each_old_or_new_or_absent(found: dict[str, torch.Tensor], states: list[dict[str, torch.Tensor]]) -> None:
    for what, each in found.items():
        if not what.startswith("optimizer"):
            assert any(torch.equal(each, state[what]) for state in states), what


def test_a_budget_below_the_largest_op(profile: HardwareProfile) -> None:
    job = make_job(adamw)
    with fit(job, profile, 4_000) as room, pytest.raises(Infeasible) as caught, room.step():
        job.step(0)
    message = str(caught.value)
    assert "parameters, gradients and optimizer state that it uses" in message
    assert "never leave the device" not in message
    job = make_job(adamw)
    message = 'never leave the device with manages="activations"'
    with fit(job, profile, PARAMETER_BYTES // 2, manages="activations") as room:  # noqa: SIM117
        with pytest.raises(Infeasible, match=message), room.step():
            job.step(0)


@pytest.mark.parametrize("is_inside", [True, False])
def test_detaching(is_inside: bool, profile: HardwareProfile) -> None:
    states = list_states(2)
    job = make_job(adamw)
    room = fit(job, profile)
    with room.step():
        job.step(0)
    get_pager(room).make_room(EVERYTHING)
    if is_inside:
        with room.step():
            loss = job.model(make_batch(1)).square().mean()
            room.detach()
            loss.backward()
            job.optimizers[0].step()
    else:
        room.detach()
        job.step(1)
    assert_same(list_changed(job), states[2])
    assert "step" not in vars(job.optimizers[0])


def test_a_room_that_is_dropped(profile: HardwareProfile) -> None:
    states = list_states(2)
    job = make_job(adamw)
    room = fit(job, profile)
    with room.step():
        job.step(0)
    get_pager(room).make_room(EVERYTHING)
    gone = weakref.ref(room)
    del room
    gc.collect()
    assert gone() is None
    job.step(1)
    assert_same(list_changed(job), states[2])


def test_budgets_that_shrink_and_grow(profile: HardwareProfile) -> None:
    states = list_states(5)
    job = make_job(adamw)
    with fit(job, profile, 1 << 30) as room:
        for index, budget_bytes in enumerate((1 << 30, BUDGET, BUDGET // 2, 1 << 30, BUDGET)):
            room.set_budget(budget_bytes)
            with room.step():
                job.step(index)
            assert (room.journal().steps[-1].peak_bytes or 0) <= budget_bytes
    assert_same(list_changed(job), states[5])


def test_moved_bytes_are_told(profile: HardwareProfile) -> None:
    job = make_job(adamw)
    with fit(job, profile) as room:
        for index in range(3):
            with room.step():
                job.step(index)
        pager, metrics = get_pager(room), room.metrics()
        assert metrics["total_offloaded_bytes"] >= pager.storages.offloaded_bytes > 0
        assert metrics["total_reloaded_bytes"] >= pager.storages.reloaded_bytes > 0


PROGRAM = """
import os, signal, sys
from tests.leaks import profile
from tests.state_jobs import *
job = make_job(adamw)
room = fit(job, profile.__wrapped__(), spill_folder=sys.argv[2])
for index in range(2):
    with room.step():
        job.step(index)
get_pager(room).make_room(1 << 40)
assert get_pager(room).count_away() > 0
if sys.argv[1] == "killed":
    def kill(*_):
        print("killing", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    module = sys.modules["torch.optim.adam"]
    update = module.adam
    calls = []
    def update_or_die(*args, **options):
        calls.append(1)
        kill() if len(calls) > 7 else update(*args, **options)
    module.adam = update_or_die
    with room.step():
        job.step(2)
elif sys.argv[1] == "raises":
    raise SystemExit("over")
else:
    keep = [job, room, room]
    sys.modules["kept"] = keep
"""


@pytest.mark.parametrize(("how", "code"), [("ends", 0), ("raises", 1), ("killed", -signal.SIGKILL)])
def test_the_end_of_the_process(how: str, code: int, tmp_path: Any) -> None:
    """Without a trace of state that is away: no error, no wait, no file."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr and "Error" not in ended.stderr, ended.stderr
    assert list(tmp_path.iterdir()) == []
    assert ("killing" in ended.stdout) == (how == "killed")
