"""Memory between steps: state leaves for what an evaluation takes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from elbowroom.ir.hardware import HardwareProfile
from elbowroom.lent_bytes import LentBytes
from elbowroom.room import Room
from elbowroom.sharing.messages import LeaseGrant
from tests.state_jobs import BUDGET, PARAMETER_BYTES, WIDTH, OutsideMeter, StateJob, adamw, fit, make_batch, make_job

ROWS = BUDGET // (4 * WIDTH * 4)
"""Rows of an evaluation whose three largest tensors take three quarters of the budget."""


@pytest.fixture(scope="module")
def expected() -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What an evaluation after four steps gives without a room, and the parameters after the fifth."""
    job = make_job(adamw)
    for index in range(4):
        job.step(index)
    loss = evaluate(job.model)
    job.step(4)
    return loss, [each.detach().clone() for each in job.model.parameters()]


@pytest.fixture(params=["dynamic", "auto"])
def room(request: pytest.FixtureRequest, profile: HardwareProfile, expected: object) -> tuple[StateJob, Room]:
    """A job and its room after four steps. Less than half of the state is in memory."""
    job = make_job(adamw)
    room = fit(job, profile, mode=request.param)
    train(job, room)
    return job, room


def train(job: StateJob, room: Room) -> None:
    for index in range(4):
        with room.step():
            job.step(index)


def evaluate(model: nn.Module, rows: int = ROWS) -> torch.Tensor:
    with torch.no_grad():
        return model(make_batch(9, rows)).square().mean()


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("is_metered", [False, True], ids=["plain", "metered"])
def test_evaluation_keeps_the_budget(
    mode: str, is_metered: bool, profile: HardwareProfile, expected: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    meter = OutsideMeter() if is_metered else None
    job = make_job(adamw)
    with fit(job, profile, mode=mode) as room:
        train(job, room)
        room._ledger.take_recent_peak()
        begin = 0.0 if meter is None else meter.count_seconds()
        loss = evaluate(job.model)
        assert BUDGET // 2 < room._ledger.take_recent_peak() <= BUDGET
        if meter is not None:
            meter.stop()
            assert BUDGET // 2 < meter.find_peak(begin) <= BUDGET
        with room.step():
            job.step(4)
        assert room.metrics()["max_peak_bytes"] <= BUDGET
    assert torch.equal(loss, expected[0])
    assert all(map(torch.equal, job.model.parameters(), expected[1]))


def test_what_has_no_room_passes(room: tuple[StateJob, Room]) -> None:
    job, inside = room
    with inside:
        evaluate(job.model, 2 * ROWS)
        assert inside._ledger.take_recent_peak() > BUDGET
        train(job, inside)
        assert inside.metrics()["max_peak_bytes"] <= BUDGET
        inside._ledger.take_recent_peak()
        evaluate(job.model)
        assert inside._ledger.take_recent_peak() <= BUDGET


def test_a_copy_of_the_model_has_room(room: tuple[StateJob, Room]) -> None:
    job, inside = room
    with inside:
        inside._ledger.take_recent_peak()
        average = copy.deepcopy(job.model)
        assert inside._ledger.take_recent_peak() <= BUDGET
        assert all(map(torch.equal, average.parameters(), job.model.parameters()))


def test_evaluation_in_another_thread_keeps_the_budget(room: tuple[StateJob, Room]) -> None:
    job, inside = room
    with inside:
        expected, found = evaluate(job.model), []
        train(job, inside)
        inside._ledger.take_recent_peak()
        thread = threading.Thread(target=lambda: found.append(evaluate(job.model)))
        thread.start()
        thread.join()
        assert inside._ledger.take_recent_peak() <= BUDGET
        assert found[0].isfinite() and not torch.equal(found[0], expected)  # trained meanwhile


def test_a_step_begins_while_another_thread_asks_for_room(
    room: tuple[StateJob, Room], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, inside = room
    is_asking, has_begun = threading.Event(), threading.Event()

    def find_none(missing_bytes: int) -> int:
        is_asking.set()
        has_begun.wait(10)
        return 0

    with inside:
        with monkeypatch.context() as patch:
            patch.setattr(inside._pager, "make_room", find_none)
            thread = threading.Thread(target=lambda: torch.empty(BUDGET, dtype=torch.uint8))
            thread.start()
            is_asking.wait(10)
        with inside.step():
            limit_bytes = inside._ledger.scope.limit_bytes
            has_begun.set()
            thread.join()
            assert inside._ledger.scope.limit_bytes == limit_bytes <= BUDGET
            assert inside._pager.budget_bytes == BUDGET
            job.step(4)


@pytest.mark.parametrize("end", [Room.detach, lambda room: room.__exit__()], ids=["detach", "exit"])
def test_all_state_comes_back_at_the_end(room: tuple[StateJob, Room], end: Callable[[Room], None]) -> None:
    job, inside = room
    end(inside)
    held = [*job.model.parameters(), *(each for state in job.optimizers[0].state.values() for each in state.values())]
    assert sum(each.untyped_storage().nbytes() for each in held) > 2 * PARAMETER_BYTES
    assert all(each.isfinite().all() for each in held)


class Client:
    """A connection to a broker that grants nothing more."""

    def __init__(self) -> None:
        self.used_bytes: list[int] = []

    def note_use(self, nbytes: int) -> None:
        self.used_bytes.append(nbytes)


def test_state_leaves_for_a_job_that_lends(room: tuple[StateJob, Room]) -> None:
    job, inside = room
    with inside:
        client = Client()
        lent = LentBytes(client, 1)  # type: ignore[arg-type]
        lent.attach(inside._ledger, inside._pager)
        lent.applied = LeaseGrant(sequence=1, epoch=1, nbytes=BUDGET)
        lent.begin_idle(0.0)
        inside._ledger.limit_between_steps(BUDGET, lent._make_room)
        inside._ledger.take_recent_peak()
        evaluate(job.model)
        assert inside._ledger.take_recent_peak() <= BUDGET and not client.used_bytes
        evaluate(job.model, 2 * ROWS)
        assert inside._ledger.take_recent_peak() > BUDGET and client.used_bytes
