"""Rooms on a shared device: three models in three processes within half of what they take, with the same bits."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

import elbowroom
from elbowroom import job_front, lent_bytes, shared_lease
from elbowroom.config import read_config
from elbowroom.errors import BrokerLost, Infeasible, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.sharing.demand import FrontPoint
from elbowroom.sharing.messages import LeaseGrant, StatusReply
from elbowroom.sharing.transport import client
from elbowroom.sharing.transport.address import FOLDER_VARIABLE, find_address
from elbowroom.sharing.transport.client import BrokerClient, ask_status
from elbowroom.step_boundaries import StepBoundaries
from tests.shared_job import count_most_bytes, train_plain

ROOT = pathlib.Path(__file__).parents[2]
PLAIN_MIB = {"unet": 48, "vit": 63, "bert": 77}
"""Peaks of the models' steps in a large budget."""

DEVICE_MIB = sum(PLAIN_MIB.values()) // 2
STEPS = 5


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    with tempfile.TemporaryDirectory(prefix="er-") as found:  # short, for the socket
        monkeypatch.setenv(FOLDER_VARIABLE, f"{found}/share")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        yield pathlib.Path(found)


@contextlib.contextmanager
def process(*command: object) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def broker(mib: int, *options: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return process("-m", "elbowroom", "share", "--device", "cpu", "--memory", f"{mib}MiB", *options)


def await_status() -> StatusReply:
    for _ in range(400):
        with contextlib.suppress(UsageError):
            return ask_status(find_address("cpu"))
        time.sleep(0.05)
    raise AssertionError("no broker came up")


def await_no_jobs() -> None:
    for _ in range(1000):
        if not await_status().jobs:
            return
        time.sleep(0.01)
    raise AssertionError(f"the broker still has {await_status().jobs}")


def test_three_jobs_within_half_of_their_peaks(folder: pathlib.Path, profile: HardwareProfile) -> None:
    elbowroom.save(profile, folder / "profile.json")
    plain = {name: train_plain(name, STEPS) for name in PLAIN_MIB}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(broker(DEVICE_MIB, "--quantum", 2))
        await_status()
        jobs = {
            name: stack.enter_context(
                process(ROOT / "tests" / "shared_job.py", name, "shared", STEPS, folder / "profile.json")
            )
            for name in PLAIN_MIB
        }
        assert jobs["unet"].stdout is not None
        jobs["unet"].stdout.readline()  # its first step
        first.kill()  # the jobs go on, and find the next one
        first.wait()
        stack.enter_context(broker(DEVICE_MIB, "--quantum", 2))
        outputs = {name: job.communicate(timeout=120)[0].splitlines()[-1] for name, job in jobs.items()}
        assert all(job.returncode == 0 for job in jobs.values())
        while (reply := await_status()).jobs:
            time.sleep(0.02)  # until the broker sees that the last process has ended
        assert reply.free_bytes == DEVICE_MIB << 20
    found = {name: json.loads(text) for name, text in outputs.items()}
    for name, result in found.items():
        assert {key: result[key] for key in ("losses", "digest")} == plain[name]
        assert all(peak <= budget for peak, budget in result["budgets"])
    assert 0 < count_most_bytes([each["levels"] for each in found.values()]) <= DEVICE_MIB << 20


@pytest.mark.parametrize("tells_steps", [False, True])
def test_a_room_follows_its_lease(
    tells_steps: bool, folder: pathlib.Path, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train(room: elbowroom.room.Room) -> None:  # type: ignore[name-defined]
        with room.step() if tells_steps else contextlib.nullcontext():
            model(torch.ones(2048, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(UsageError, match="elbowroom share --device cpu"):
        elbowroom.fit(model, optimizer, "shared", profile=profile)
    with pytest.raises(UsageError, match="memory_budget, or the variable ELBOWROOM_MEMORY_BUDGET"):
        elbowroom.fit(model, optimizer)
    monkeypatch.setenv("ELBOWROOM_MEMORY_BUDGET", "shared")
    with broker(64) as server:
        await_status()
        room = elbowroom.fit(model, optimizer, profile=profile, without_broker="stop")
        assert room.budget_bytes <= 64 << 20
        for _ in range(4):
            train(room)
        (job,) = ask_status(find_address("cpu")).jobs
        assert job.lease_bytes == room.budget_bytes < 64 << 20  # from its front, no longer a guess
        assert job.floor_bytes <= job.lease_bytes <= job.wanted_bytes
        with pytest.raises(UsageError, match="its lease of a shared device, which the broker changes"):
            room.set_budget(64 << 20)
        before = [each.tolist() for each in model.parameters()]
        assert room.move_state_out() < sum(each.nbytes for each in model.parameters()) // 4
        assert [each.tolist() for each in model.parameters()] == before
        room._steps.shared.rest(room)
        (job,) = ask_status(find_address("cpu")).jobs
        assert (job.state, job.lease_bytes) == ("resting", 0)
        assert job.held_bytes < sum(each.nbytes for each in model.parameters()) // 4
        train(room)
        assert ask_status(find_address("cpu")).jobs[0].state == "running"
        server.kill()
        server.wait()
        while room._steps.shared._client.is_connected:
            time.sleep(0.01)
        with pytest.raises(BrokerLost, match="without_broker is 'stop'"):
            train(room)
        room.detach()


def test_a_job_that_evaluates_lends_what_it_does_not_use(
    folder: pathlib.Path, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lent_bytes, "LEAST_IDLE_SECONDS", 0.2)
    monkeypatch.setattr(lent_bytes, "REGAIN_SECONDS", 60.0)  # however busy the machine is
    monkeypatch.setattr(lent_bytes, "LONGEST_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(client, "SECONDS_BETWEEN_HEARTBEATS", 0.02)
    data = torch.rand(2048, 64)

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.GELU())]
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64), *layers)
        return model, torch.optim.AdamW(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def evaluate_until(is_done: Callable[[int, int], bool]) -> None:
        for _ in range(1000):
            model(data[:64])
            jobs = {job.name: job.lease_bytes for job in await_status().jobs}
            if is_done(jobs["Sequential"], jobs["other"]):
                return
            time.sleep(0.01)
        raise AssertionError(jobs)

    def follow() -> None:
        if other.grant is not None and other.take(other.grant):
            other.confirm(other.grant, other.grant.nbytes)

    def train_in_room() -> None:
        with room.step():
            train(model, optimizer)

    model, optimizer = make()
    with broker(24):
        await_status()
        room = elbowroom.fit(model, optimizer, "shared", profile=profile, least_bytes=16 << 20)
        for _ in range(4):
            train_in_room()
        assert room.planned is not None
        lease_bytes, plan = room.budget_bytes, room.planned.plan
        (job,) = await_status().jobs
        assert job.lease_bytes == lease_bytes > job.floor_bytes * 8 // 7
        other = BrokerClient(find_address("cpu"), name="other", floor_bytes=6 << 20, held_bytes=0, weight=1e-6)
        other.on_beat = follow
        other.report(6 << 20, ((6 << 20, 2.0, 0.0), (10 << 20, 1.0, 0.0)))
        evaluate_until(lambda ours, theirs: (ours, theirs) == (job.floor_bytes, 10 << 20))
        train_in_room()  # with the same lease as before, and the plan that was made for it
        assert (room.budget_bytes, room.planned.plan) == (lease_bytes, plan)
        with pytest.raises(ValueError, match="a bad batch"), room.step():
            raise ValueError("a bad batch")
        evaluate_until(lambda ours, theirs: (ours, theirs) == (job.floor_bytes, 10 << 20))
        large = torch.ones(15 << 18)  # has the lease back first
        jobs = {each.name: each for each in await_status().jobs}
        assert jobs["Sequential"].lease_bytes == lease_bytes and jobs["other"].held_bytes == 6 << 20
        larger = torch.ones(2 << 18)  # is more than was ever leased: it counts as taken
        held_bytes = {each.name: each.held_bytes for each in await_status().jobs}["Sequential"]
        assert held_bytes >= large.nbytes + larger.nbytes
        del large, larger
        train_in_room()
        room.detach()
        other.close()
    plain, plain_optimizer = make()
    for _ in range(6):
        train(plain, plain_optimizer)
    assert [each.tolist() for each in model.parameters()] == [each.tolist() for each in plain.parameters()]


@pytest.mark.parametrize(("needed_bytes", "points"), [(7, ((8, 2.0, 1.0), (16, 1.0, 1.0))), (20, ())])
def test_a_job_whose_lease_is_too_small_goes_on_wanting_more(
    needed_bytes: int, points: tuple[tuple[int, float, float], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined = mock.create_autospec(BrokerClient, instance=True)
    monkeypatch.setattr(shared_lease, "BrokerClient", lambda *_, **__: joined)
    lease = shared_lease.SharedLease("cpu", "job", 0, read_config(), 1)
    lease._lent.front = 4, ((4, 3.0, 1.0), (8, 2.0, 1.0), (16, 1.0, 1.0))
    lease._fronts._known["step"] = lease._lent.front
    room = mock.Mock(budget_bytes=16)
    room.set_budget.side_effect = Infeasible(needed_bytes=needed_bytes, budget_bytes=5, op="mm", is_whole_step=True)
    lease._take_up(room, LeaseGrant(sequence=1, epoch=1, nbytes=5), has_lent=True)
    joined.report.assert_called_once_with(needed_bytes, points)
    assert lease._lent.front == (needed_bytes, points)
    assert list(lease._fronts._known) == (["step"] if points else [])  # else the next step reports its front


def test_the_floor_of_a_job_is_that_of_its_largest_kind_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def point(nbytes: int, step_seconds: float) -> FrontPoint:
        return FrontPoint(nbytes=nbytes, step_seconds=step_seconds, busy_seconds=0.5)

    found: dict[str, tuple[int, tuple[FrontPoint, ...]]] = {
        "large": (40, (point(40, 4.0), point(80, 3.0))),
        "small": (10, (point(10, 2.0), point(20, 1.0))),
        "medium": (30, (point(30, 2.0), point(60, 1.0))),
    }
    monkeypatch.setattr(job_front, "find_step_front", lambda planned, _: found[planned.costs.trace_digest])

    def expect(kind: str) -> bool:
        return front.expect(mock.Mock(**{"costs.trace_digest": kind}), 100)

    front = job_front.JobFront(read_config())
    assert expect("small") and front.combine() == (10, ((10, 2.0, 0.5), (20, 1.0, 0.5)))
    assert not expect("small")
    assert expect("large") and front.combine() == (40, ((40, 4.0, 0.5), (80, 3.0, 0.5)))
    assert expect("small") and front.combine() == (40, ((40, 1.0, 0.5),)), "the large step comes again"
    assert expect("medium") and front.combine() == (40, ((60, 1.0, 0.5),))
    for index in range(job_front.MOST_KINDS - 1):
        found[f"other {index}"] = (1, ())
        expect(f"other {index}")
    assert front.combine() == (30, ()), "kinds that no longer come are forgotten"
    front.note_unplanned(35)
    front.note_unplanned(36)
    assert front.combine() == (35, ()), "no plan fits, but it has run"


def test_a_job_is_not_idle_while_its_front_is_planned() -> None:
    modes, shared, room = mock.Mock(), mock.Mock(), mock.Mock()
    modes.step.return_value = contextlib.nullcontext()
    steps = StepBoundaries(modes, shared, room)
    steps.begin_step()
    steps.end_step()
    assert [name for name, _, _ in shared.method_calls] == ["renew", "note_step", "begin_idle"]


def test_a_room_that_the_collector_frees_inside_a_step_is_detached() -> None:
    modes, shared, room = mock.Mock(), mock.Mock(), mock.Mock()
    modes.step.return_value = contextlib.nullcontext()
    shared.begin_idle.side_effect = lambda holder: holder.metrics()
    steps = StepBoundaries(modes, shared, weakref.proxy(room))
    steps.begin_step()
    del room
    gc.collect()
    steps.close()
    assert shared.begin_idle.called and not steps.is_inside


def test_a_step_without_room_says_that_its_budget_is_a_lease() -> None:
    error = Infeasible(needed_bytes=7, budget_bytes=5, op="mm", is_whole_step=False)
    modes, shared = mock.Mock(), mock.Mock()
    modes.step.return_value = contextlib.nullcontext()
    steps = StepBoundaries(modes, shared, mock.Mock())
    steps.begin_step()
    steps.end_step(error)
    assert "this job's lease of a shared device" in str(error)
    assert not shared.note_step.called


def test_a_refused_job_may_ask_for_less(folder: pathlib.Path, profile: HardwareProfile) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))  # 32 MiB
    optimizer = torch.optim.SGD(model.parameters())
    with broker(60):
        await_status()
        with pytest.raises(UsageError, match="pass least_bytes="):
            elbowroom.fit(model, optimizer, "shared", profile=profile)
        with elbowroom.fit(model, optimizer, "shared", least_bytes=40 << 20, profile=profile):
            assert [each.state for each in await_status().jobs] == ["running"]
        del model, optimizer
        gc.collect()
        await_no_jobs()


def test_a_job_lends_before_its_first_step(folder: pathlib.Path, profile: HardwareProfile) -> None:
    """So that a program can make a second room before it trains in the first one."""
    models = [torch.nn.Linear(256, 256) for _ in range(2)]
    with broker(32), contextlib.ExitStack() as stack:
        await_status()
        jobs = []
        for model in models:
            optimizer = torch.optim.SGD(model.parameters())
            room = elbowroom.fit(model, optimizer, "shared", least_bytes=8 << 20, profile=profile)
            jobs.append((stack.enter_context(room), model, optimizer))
        for room, model, optimizer in jobs * 2:
            with room.step():
                model(torch.ones(8, 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def test_an_ended_job_counts_until_its_model_is_gone(folder: pathlib.Path, profile: HardwareProfile) -> None:
    def list_held() -> list[int]:
        return [job.held_bytes for job in await_status().jobs]

    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state_bytes = sum(each.nbytes for each in model.parameters())
    with broker(64):
        await_status()
        for _ in range(2):  # the second job counts what the first one left
            lease = elbowroom.wait_for_lease("32MiB")
            room = elbowroom.fit(model, optimizer, lease, strategy="tensile", profile=profile)
            assert room._steps.shared._config is room.config  # its front is that of this strategy
            assert len(list_held()) == 1
            with room.step():
                model(torch.ones(8, 1024)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            room.detach()
            assert state_bytes <= sum(list_held()) < 2 * state_bytes
        other = elbowroom.wait_for_lease("48MiB")
        other.close()
        held = list_held()
        dropped = elbowroom.wait_for_lease("4MiB")
        assert list_held() != held
        del dropped
        for _ in range(1000):
            if list_held() == held:
                break
            time.sleep(0.01)
        assert list_held() == held
        del model, optimizer, room, lease
        gc.collect()
        await_no_jobs()


def test_a_job_that_is_fitted_again_never_stops_counting(
    folder: pathlib.Path, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of the first job and the beginning of the second, its bytes are in no other lease."""
    model = torch.nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state_bytes = sum(each.nbytes for each in model.parameters())
    connect = BrokerClient._connect

    def look_and_connect(joining: BrokerClient) -> None:
        seen.append(sum(job.held_bytes for job in await_status().jobs))
        connect(joining)

    with broker(64):
        await_status()
        for _ in range(3):
            seen: list[int] = []
            with elbowroom.fit(model, optimizer, "shared", strategy="tensile", profile=profile):
                model(torch.ones(8, 1024)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            monkeypatch.setattr(BrokerClient, "_connect", look_and_connect)
            (job,) = await_status().jobs
            assert job.state == "resting"
        assert len(seen) == 1 and seen[0] >= state_bytes
        del model, optimizer
        gc.collect()
        await_no_jobs()


def test_a_lease_is_for_one_room(folder: pathlib.Path, profile: HardwareProfile) -> None:
    """The broker gives the bytes of a job that has ended to others."""

    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(64, 64)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with broker(64):
        await_status()
        lease = elbowroom.wait_for_lease("32MiB", priority=2)
        with pytest.raises(UsageError, match=r"pass priority and least_bytes to elbowroom\.wait_for_lease"):
            elbowroom.fit(*make(), lease, profile=profile, priority=3, least_bytes=1 << 20)
        job = make()
        with elbowroom.fit(*job, lease, profile=profile, priority=2):
            with pytest.raises(UsageError, match="this lease has a room already"):
                elbowroom.fit(*make(), lease, profile=profile)
            assert len(await_status().jobs) == 1
        with pytest.raises(UsageError, match="this lease has ended"):
            elbowroom.fit(*job, lease, profile=profile)
