"""Inputs from before `fit` that a step meets in its middle: room is made for them first."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode

pytestmark = pytest.mark.usefixtures("activations_only")

WIDTH, ROWS, LAYERS = 64, 512, 16
BLOCK_BYTES = 4 * ROWS * WIDTH
"""Of one activation."""

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def save_index(model: nn.Module, y: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """Autograd saves the input before the op runs."""
    return y.gather(1, late).square().mean()


def read(model: nn.Module, y: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """An op reads the input, and autograd does not save it."""
    return (y - late.view(-1, ROWS, WIDTH).mean(0)).square().mean()


def add_in_place(model: nn.Module, y: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """An op that writes to another tensor reads the input."""
    return (2 * y).add_(late.view(-1, ROWS, WIDTH)[0]).square().mean()


def call_again(model: nn.Module, y: torch.Tensor, late: torch.Tensor) -> torch.Tensor:
    """The model is called with a part of the input."""
    return y.square().mean() + model(late.view(-1, ROWS, WIDTH)[0]).square().mean()


LOSSES = (save_index, read, add_in_place, call_again)


class Job:
    """Training with an input from before `fit` that the model is not called with at first.

    Attributes:
        late: this input.
        live_bytes: of the room, whenever `late` is about to be read.
        values: losses of all steps.
    """

    def __init__(self, loss: Loss) -> None:
        torch.manual_seed(0)
        layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.late = self.make_late(loss, 4)
        self.live_bytes: list[int] = []
        self.values: list[torch.Tensor] = []
        self._loss = loss
        self._x = torch.randn(ROWS, WIDTH)

    @staticmethod
    def make_late(loss: Loss, blocks: int) -> torch.Tensor:
        """Return an input of so many times the bytes of an activation."""
        if loss is save_index:
            return torch.randint(WIDTH, (ROWS, WIDTH * blocks // 2))
        return torch.randn(blocks * ROWS, WIDTH)

    def enter(self, budget: int, profile: HardwareProfile, mode: str = "dynamic") -> elbowroom.Room:
        options: dict[str, Any] = {"mode": mode, "min_offload_bytes": 1, "profile": profile}
        return elbowroom.fit(self.model, self.optimizer, budget, strategy="offload_all", **options)

    def step(self, room: elbowroom.Room) -> None:
        with room.step():
            y = self.model(self._x)
            self.live_bytes.append(room._ledger.live_bytes)
            value = self._loss(self.model, y, self.late)
            del y
            value.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.values.append(value.detach())

    def list_results(self) -> list[torch.Tensor]:
        return [*self.values, *(each.detach() for each in self.model.parameters())]


def run_generously(loss: Loss, profile: HardwareProfile, lates: Sequence[torch.Tensor] = ()) -> Job:
    """Return a job after some steps in which everything stays, with these inputs or three times its own."""
    job = Job(loss)
    with job.enter(1 << 30, profile) as room:
        for late in lates or [job.late] * 3:
            job.late = late
            job.step(room)
    return job


def expect_the_same(found: Job, expected: Job) -> None:
    assert all(torch.equal(*pair) for pair in zip(found.list_results(), expected.list_results(), strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_room_is_made_before_an_input_counts(loss: Loss, profile: HardwareProfile) -> None:
    generous = run_generously(loss, profile)
    budget = generous.live_bytes[0] + 2 * BLOCK_BYTES
    job = Job(loss)
    with job.enter(budget, profile) as room:
        for _ in range(3):
            job.step(room)
        records = room.journal().steps
    assert max(job.live_bytes) + job.late.nbytes > budget, "there was room without making any"
    assert max(record.peak_bytes or 0 for record in records) <= budget
    assert any(record.offloaded_bytes or record.recomputed for record in records)
    expect_the_same(job, generous)


@pytest.mark.parametrize(
    ("loss", "mode"),
    [*((loss, "dynamic") for loss in LOSSES), (save_index, "auto"), (call_again, "auto")],  # plans see no other reads
)
def test_an_input_that_cannot_have_room_is_refused(loss: Loss, mode: str, profile: HardwareProfile) -> None:
    """It is refused before anything reads it, and the steps after that are as if there had been none."""
    expected = run_generously(loss, profile)
    budget = expected.live_bytes[0] + 2 * BLOCK_BYTES
    job = Job(loss)
    late, large = job.late, job.make_late(loss, 64)
    with job.enter(budget, profile, mode) as room:
        for index in range(6):
            is_refused = index % 2 == 1
            job.late = large if is_refused else late
            if not is_refused:
                job.step(room)
                continue
            before = room._ledger.live_bytes
            why = f"when an op that reads an input of {large.nbytes} bytes runs.*: what the op asks for 8.0 MiB"
            with pytest.raises(Infeasible, match=why):
                job.step(room)
            gc.collect()
            assert room._ledger.live_bytes == before
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget
    expect_the_same(job, expected)


def test_a_step_leaves_its_plan_to_make_room_for_a_larger_input(profile: HardwareProfile) -> None:
    lates = [Job.make_late(call_again, blocks) for blocks in (4, 4, 4, 8)]
    generous = run_generously(call_again, profile, lates)
    budget = generous.live_bytes[0] + 2 * BLOCK_BYTES
    job = Job(call_again)
    with job.enter(budget, profile, "auto") as room:
        for job.late in lates:
            job.step(room)
        records = room.journal().steps
    assert [record.mode for record in records[2:]] == [Mode.PLANNED, Mode.DRIFTED]
    assert max(record.peak_bytes or 0 for record in records) <= budget
    expect_the_same(job, generous)
