"""Predictions of op times: from what this machine measured before, and corrected where steps prove them wrong."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.cost import op_time_store
from elbowroom.hardware.past_times import PastTimes
from elbowroom.hardware.probe import name_machine
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.plan_cache import STEPS_THAT_SET_THE_PACE, PlanCache
from elbowroom.plan_cache_entry import PlanCacheEntry, Source
from elbowroom.room import Room

WIDTH, ROWS, LAYERS = 64, 512, 6
SLOW_SECONDS = 0.02


class _Waits:
    """How long the custom op waits at each call."""

    seconds = 0.0


@torch.library.custom_op("elbowroom_tests::slow_copy", mutates_args=())
def slow_copy(x: torch.Tensor) -> torch.Tensor:
    time.sleep(_Waits.seconds)
    return x.clone()


slow_copy.register_fake(torch.empty_like)
slow_copy.register_autograd(lambda context, gradient: gradient)


Job = tuple["Net", torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(slow_copy(x)) * 1.5)
        return x.square().mean()


@pytest.fixture(autouse=True)
def at_first_quick() -> Iterator[None]:
    _Waits.seconds = 0.0
    yield
    _Waits.seconds = 0.0


def make_job(*, is_mostly_state: bool = False) -> Job:
    torch.manual_seed(3)
    model = Net(4 * WIDTH if is_mostly_state else WIDTH)
    if is_mostly_state:
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def train(job: Job, room: Room | None, steps: int) -> None:
    model, optimizer = job
    width = model.layers[0].in_features
    rows = ROWS * WIDTH // width // 4 if width > WIDTH else ROWS
    for index in range(steps):
        x = torch.randn(rows, width, generator=torch.Generator().manual_seed(index))
        if room is None:
            do_step(model, optimizer, x)
        else:
            with room.step():
                do_step(model, optimizer, x)


def do_step(model: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def replans(monkeypatch: pytest.MonkeyPatch) -> list[PlanCacheEntry]:
    """The entries that were planned again because of wrong predictions."""
    found = []
    replan = PlanCache.replan

    def note(cache: PlanCache, entry: PlanCacheEntry, measurements: Any) -> None:
        is_first = entry.source is Source.ESTIMATED  # measured beside a compiling process
        replan(cache, entry, measurements)
        if not is_first:
            found.append(entry)

    monkeypatch.setattr(PlanCache, "replan", note)
    return found


@pytest.mark.parametrize("manages", ["activations", "everything"])
def test_ops_that_become_slow_lead_to_one_new_plan(
    manages: str, profile: HardwareProfile, replans: list[PlanCacheEntry]
) -> None:
    job = make_job(is_mostly_state=manages == "everything")
    state_bytes = 4 * sum(each.nbytes for each in job[0].parameters())
    budget = 3 * state_bytes // 4 if manages == "everything" else 3 * ROWS * WIDTH * 4 * LAYERS // 2
    with elbowroom.fit(*job, budget, profile=profile, min_offload_bytes=1, manages=manages) as room:
        _Waits.seconds = SLOW_SECONDS
        train(job, room, 12)
        assert room.journal().steps[-1].mode is Mode.PLANNED and room.planned is not None
        assert not room.planned.is_plain
        assert bool(room.planned.plan.state) is (manages == "everything")
        assert not replans, "a steady job keeps its plan"
        _Waits.seconds = 3 * SLOW_SECONDS
        train(job, room, 12)
        (entry,) = replans
        trace, costs = entry.planned.trace, entry.planned.costs
        assert all(torch.isfinite(each).all() for each in job[0].parameters())
        slow = [seconds for op, seconds in zip(trace.ops, costs.op_seconds, strict=True) if "slow_copy" in op.name]
        assert len(slow) == LAYERS
        # Later steps have scaled the op times to the seconds of whole steps, which other work makes uneven.
        assert min(slow) > 1.3 * SLOW_SECONDS, slow
        steps = room.journal().steps
        assert all(step.mode is Mode.PLANNED for step in steps[3:])
        assert max(step.peak_bytes or 0 for step in steps) <= budget
        measured = sorted(step.seconds for step in steps[-5:])
        assert measured[0] / 2 < room.planned.forecast.step_seconds < 2 * measured[-1]
    _Waits.seconds = 0.0
    plain = make_job(is_mostly_state=manages == "everything")
    train(plain, None, 12)
    train(plain, None, 12)
    assert all(torch.equal(*pair) for pair in zip(job[0].parameters(), plain[0].parameters(), strict=True))


@pytest.mark.parametrize("factor", [0, 3])
def test_a_host_that_does_not_wait_for_ops_only_shows_that_steps_are_slower(
    factor: int, profile: HardwareProfile, replans: list[PlanCacheEntry]
) -> None:
    """On CUDA, where its time is that of the step only if it sets the pace."""
    job = make_job()
    with elbowroom.fit(*job, 3 * ROWS * WIDTH * 4 * LAYERS // 2, profile=profile, min_offload_bytes=1) as room:
        _Waits.seconds = SLOW_SECONDS
        train(job, room, 3)
        assert room.planned is not None and not room.planned.is_plain
        before = room.planned.forecast.step_seconds
        room._cache.planner.device = torch.device("cuda")
        _Waits.seconds = factor * SLOW_SECONDS
        train(job, room, STEPS_THAT_SET_THE_PACE + 2)
        after, measured = room.planned.forecast.step_seconds, room.journal().steps[-1].seconds
        assert not replans
        assert after > before / 2 if factor == 0 else 0.8 * measured < after < 1.25 * measured, (
            before,
            after,
            measured,
        )


def test_what_one_room_measured_prices_the_first_plan_of_the_next(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """On this machine only, with this number of threads, and if the store is not turned off."""
    monkeypatch.setenv("ELBOWROOM_OP_TIME_STORE", "1")
    monkeypatch.setattr(op_time_store, "find_cache", lambda: tmp_path)
    here = dataclasses.replace(profile, name=name_machine(torch.device("cpu")), op_latency_seconds=1e-3)
    _Waits.seconds = SLOW_SECONDS

    def sum_slow(machine: HardwareProfile) -> float:
        _Waits.seconds, before = 0.0, _Waits.seconds
        model, optimizer = make_job()
        x = torch.randn(ROWS, WIDTH)
        with elbowroom.fit(
            model, optimizer, 1 << 30, profile=machine, step=lambda: do_step(model, optimizer, x)
        ) as room:
            assert room.planned is not None and not room.planned.costs.measured
            found = zip(room.planned.trace.ops, room.planned.costs.op_seconds, strict=True)
            seconds = sum(each for op, each in found if "slow_copy" in op.name)
        _Waits.seconds = before
        return seconds

    assert sum_slow(here) < 0.1 * LAYERS * SLOW_SECONDS
    job = make_job()
    with elbowroom.fit(*job, 1 << 30, profile=here) as room:
        train(job, room, 3)
    assert list(tmp_path.glob("op_times/*.json"))
    assert LAYERS * SLOW_SECONDS <= sum_slow(here) < 1.5 * LAYERS * SLOW_SECONDS
    assert sum_slow(dataclasses.replace(here, name="another machine")) < 0.1 * LAYERS * SLOW_SECONDS
    assert PastTimes(here).load() and not PastTimes(here, is_enabled=False).load()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert not PastTimes(here).load()
    finally:
        torch.set_num_threads(threads)
