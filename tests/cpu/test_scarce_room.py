"""Too little room in the tier below, and budgets that no plan of the chosen strategy fits."""

from __future__ import annotations

import gc
import itertools
import types
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible, TierFull
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.tiers.disk import SpillFile
from tests.state_jobs import StateJob, assert_same, list_tensors

STEPS = 6
PEAK_BYTES = 17_480_000
"""Of the job without a room."""


def make_job() -> StateJob:
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(6)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index: int) -> torch.Tensor:
        batch = torch.randn(256, 128, generator=torch.Generator().manual_seed(index))
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def make_wide_job() -> StateJob:
    """Make a job whose largest ops do not fit as a whole within a budget that is large enough for slices."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(128, 128), nn.GELU())))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def step(index: int) -> torch.Tensor:
        batch = torch.randn(512, 128, generator=torch.Generator().manual_seed(index))
        loss = nn.functional.cross_entropy(model(batch), torch.arange(512) % 128)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def fit(job: StateJob, profile: HardwareProfile, budget: int, **options: Any) -> elbowroom.Room:
    return elbowroom.fit(
        job.model, job.optimizers, budget, profile=profile, min_offload_bytes=256, op_time_store=False, **options
    )


@pytest.mark.parametrize(("share", "host_bytes"), [(0.97, 0), (0.93, 0), (0.88, 0), (0.86, 0), (0.77, 4 << 20)])
def test_captured_steps_compute_again_what_has_no_room_below(
    share: float, host_bytes: int, profile: HardwareProfile
) -> None:
    plain = make_job()
    for index in range(STEPS):
        plain.step(index)
    job, budget = make_job(), int(share * PEAK_BYTES)
    with fit(job, profile, budget, host_bytes=host_bytes) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        steps = room.journal().steps
    assert_same(list_tensors(job), list_tensors(plain))
    assert max(each.peak_bytes or 0 for each in steps) <= budget
    assert any(each.recomputed for each in steps if each.mode is Mode.CAPTURE)


@pytest.mark.parametrize(("share", "host_bytes"), [(0.95, 0), (0.85, 0), (0.5, 9 << 20)])
def test_steps_that_recompute_get_a_plan(share: float, host_bytes: int, profile: HardwareProfile) -> None:
    plain = make_job()
    for index in range(STEPS):
        plain.step(index)
    job, budget = make_job(), int(share * PEAK_BYTES)
    with fit(job, profile, budget, host_bytes=host_bytes) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        steps = room.journal().steps
    assert_same(list_tensors(job), list_tensors(plain))
    assert max(each.peak_bytes or 0 for each in steps) <= budget
    assert all(each.mode is Mode.PLANNED and (each.recomputed or host_bytes) for each in steps[-2:])


def make_normed_job() -> StateJob:
    """Make a job whose state takes half of the peak."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 128), nn.LayerNorm(128))
        for _ in range(6)
    ]
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index: int) -> torch.Tensor:
        torch.manual_seed(1000 + index)
        loss = nn.functional.cross_entropy(model(torch.randn(256, 128)), torch.randint(0, 10, (256,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


@pytest.mark.parametrize(("budget", "host_bytes"), [(4 << 20, 6 << 20), (5 << 20, 5 << 20), (6 << 20, 4 << 20)])
def test_captures_leave_room_below_for_state(budget: int, host_bytes: int, profile: HardwareProfile) -> None:
    plain, job = make_normed_job(), make_normed_job()
    for index in range(STEPS):
        plain.step(index)
    with elbowroom.fit(job.model, job.optimizers, budget, profile=profile, host_bytes=host_bytes) as room:
        for index in range(STEPS):
            with room.step():
                job.step(index)
        steps = room.journal().steps
    assert_same(list_tensors(job), list_tensors(plain))
    assert max(each.peak_bytes or 0 for each in steps) <= budget
    assert steps[-1].mode is Mode.PLANNED


def test_a_planned_step_goes_on_if_the_tier_below_is_full(
    monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile
) -> None:
    plain, job, budget = make_job(), make_job(), int(0.82 * PEAK_BYTES)
    for index in range(STEPS):
        plain.step(index)
    with fit(job, profile, budget, manages="activations", strategy="offload_all") as room:
        for index in range(STEPS - 1):
            with room.step():
                job.step(index)
        reserve, calls = SpillFile.reserve, itertools.count()

        def refuse_some(spill: SpillFile, nbytes: int, at: int | None = None) -> int:
            if next(calls) < 4:
                raise TierFull("the disk", nbytes, 0, "Make room.")
            return reserve(spill, nbytes, at)

        monkeypatch.setattr(SpillFile, "reserve", refuse_some)
        with room.step():
            job.step(STEPS - 1)
        steps = room.journal().steps
    assert_same(list_tensors(job), list_tensors(plain))
    assert max(each.peak_bytes or 0 for each in steps) <= budget
    assert steps[-2].mode is Mode.PLANNED
    assert next(calls) > 0


def test_set_budget_takes_what_the_room_has_run_within(profile: HardwareProfile) -> None:
    job, budget = make_job(), int(0.7 * PEAK_BYTES)
    with fit(job, profile, budget, strategy="keep_all") as room:
        for nbytes in (budget, 2 * PEAK_BYTES, budget):
            room.set_budget(nbytes)
            for index in range(STEPS):
                with room.step():
                    job.step(index)
            planned = [each.mode in (Mode.PLANNED, Mode.PLAIN) for each in room.journal().steps[-2:]]
            assert all(planned) if nbytes > budget else not any(planned)
        assert max(each.peak_bytes or 0 for each in room.journal().steps[-STEPS:]) <= budget


def test_set_budget_takes_what_ran_in_slices(profile: HardwareProfile) -> None:
    plain, job, budget = make_wide_job(), make_wide_job(), 1_100_000
    for index in range(3 * STEPS):
        plain.step(index)
    with fit(job, profile, budget) as room:
        for part, nbytes in enumerate((budget, 4 << 20, budget)):
            if nbytes == budget and part > 0:
                with pytest.raises(Infeasible, match="a new fit with this budget"):
                    room.set_budget(budget - 100_000)
            room.set_budget(nbytes)
            for index in range(STEPS):
                with room.step():
                    job.step(part * STEPS + index)
        steps = room.journal().steps
    assert_same(list_tensors(job), list_tensors(plain))
    assert max(each.peak_bytes or 0 for each in steps[:STEPS] + steps[2 * STEPS :]) <= budget
    assert {each.mode for each in steps[STEPS - 2 : STEPS]} == {Mode.DYNAMIC}


def test_set_budget_knows_beside_what_slices_ran(profile: HardwareProfile) -> None:
    job, budget = make_wide_job(), 1_100_000
    with fit(job, profile, budget) as room:

        def run() -> None:
            for index in range(STEPS):
                with room.step():
                    job.step(index)

        run()
        with pytest.raises(Infeasible):
            room.set_budget(300_000)  # though there is no plan to compare with
        room.set_budget(budget + 30_000)
        run()
        room.set_budget(4 << 20)
        run()
        held = torch.zeros(15_000)
        with pytest.raises(Infeasible, match="a new fit with this budget"):
            room.set_budget(budget)
        del held
        room.set_budget(budget)
        run()
        assert max(each.peak_bytes or 0 for each in room.journal().steps[-STEPS:]) <= budget


def test_set_budget_refuses_what_has_no_room_below(profile: HardwareProfile) -> None:
    job = make_job()
    with fit(job, profile, 2 * PEAK_BYTES, strategy="keep_all", host_bytes=PEAK_BYTES // 8) as room:
        for index in range(STEPS):
            if index == STEPS - 2:
                with pytest.raises(Infeasible):
                    room.set_budget(int(0.7 * PEAK_BYTES))
            with room.step():
                job.step(index)
        assert room.journal().steps[-1].mode is Mode.PLAIN


def test_a_room_that_is_collected_in_a_cycle_brings_state_back(profile: HardwareProfile) -> None:
    def train() -> StateJob:
        job = make_job()
        room = fit(job, profile, int(0.5 * PEAK_BYTES))
        for index in range(STEPS):
            with room.step():
                job.step(index)
        assert room._pager.count_away() > 0
        trainer = types.SimpleNamespace(room=room)
        trainer.trainer = trainer
        return job

    plain = make_job()
    for index in range(STEPS):
        plain.step(index)
    job = train()
    gc.collect()
    assert_same(list_tensors(job), list_tensors(plain))
