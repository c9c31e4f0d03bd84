"""Storages that a plan only copies: nobody asks Python about them between their moves, whatever the program does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planning_times import PlanningTimes
from elbowroom.room import Room
from elbowroom.runtime.planned_moves import PlannedMoves
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.step_moves import StepMoves
from elbowroom.runtime.step_runner import StepRunner
from tests.fake_card import use_fake_card

pytestmark = pytest.mark.usefixtures("activations_only")

WIDTH, ROWS, LAYERS, STEPS = 128, 512, 8, 3

Touch = Callable[[torch.Tensor], object]
"""Does something to the output of a layer in the middle, between the passes."""


class Job:
    """A few layers; the program holds an output of one if it is to be touched."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.start = {name: each.clone() for name, each in self.model.state_dict().items()}

    def step(self, touch: Touch | None = None, *, shows: bool = False, is_shared: bool = False) -> torch.Tensor:
        """One step.

        Args:
            shows: whether it computes something beside, of which nothing is saved.
            is_shared: whether NumPy has the memory of its inputs.
        """
        x = torch.randn(ROWS, WIDTH)
        if is_shared:
            x = torch.from_numpy(x.numpy().copy())
        for index, layer in enumerate(self.model):
            x = layer(x)
            if shows and index == 1:
                x.detach().mean()
            if index == LAYERS // 2 and touch is not None:
                held = x
        loss = x.square().mean()
        if touch is not None:
            touch(held)
            del held
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def train(self, touch: Touch | None, room: Room | None = None) -> list[torch.Tensor]:
        """Losses and weights after some steps from the same weights, the second of which is touched."""
        self.model.load_state_dict(self.start)
        torch.manual_seed(5)
        losses = []
        for index in range(STEPS):
            with room.step() if room is not None else contextlib.nullcontext():
                losses.append(self.step(touch if index == 1 else None))
        return [*losses, *(each.detach().clone() for each in self.model.parameters())]


@pytest.fixture(params=["cpu", "card"])
def fit(request: pytest.FixtureRequest, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a context of a room in which steps follow a plan that offloads everything, on a CPU or on a fake card."""
    if request.param == "card":
        use_fake_card(monkeypatch, "random")

    def find_peak() -> int:
        job = Job()
        with elbowroom.fit(job.model, job.optimizer, 1 << 40, profile=profile) as room:
            for _ in range(3):
                with room.step():
                    job.step()
            assert room.planned is not None
            return room.planned.forecast.peak_bytes

    @contextlib.contextmanager
    def enter(job: Job) -> Iterator[Room]:
        budget = int(0.7 * find_peak())
        with elbowroom.fit(
            job.model, job.optimizer, budget, profile=profile, strategy="offload_all", min_offload_bytes=1
        ) as room:
            for _ in range(8):
                with room.step():
                    job.step()
                if room.journal().steps[-1].mode is Mode.PLANNED:
                    break
            assert room.planned is not None
            assert len(room.planned.candidate.copied_storages) > LAYERS // 2
            yield room
            assert room._transfers._copies == 0  # type: ignore[attr-defined]

    return enter


@pytest.fixture
def takeovers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each step that did not go as planned, what the machine took over at."""
    found: list[str] = []
    packs: list[int] = []
    take_over, pack = StepMoves.take_over, SaveHandles._make

    def noted(moves: StepMoves) -> None:
        packs.clear()
        phase = moves._state.phase.name
        take_over(moves)
        if packs:
            found.append(phase)

    def noted_pack(handles: SaveHandles, save: Any, planned: Any) -> Any:
        packs.append(save.index)
        return pack(handles, save, planned)

    monkeypatch.setattr(StepMoves, "take_over", noted)
    monkeypatch.setattr(SaveHandles, "_make", noted_pack)
    return found


def compare(fit: Any, touch: Touch | None) -> Room:
    """Train plainly and in a room, from the same weights."""
    job, expected = Job(), Job().train(touch)
    with fit(job) as room:
        found = job.train(touch, room)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        modes = [record.mode for record in room.journal().steps[-STEPS:]]
        assert modes == [Mode.PLANNED] * STEPS
        assert room.journal().steps[-1].offloaded_bytes > 0
    return room  # type: ignore[no-any-return]


def test_python_is_not_asked_about_storages_that_a_plan_only_copies(
    fit: Any, takeovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("save", "need", "retire"):
        call = getattr(StepRunner, name)

        def noted(*args: Any, name: str = name, call: Any = call) -> Any:
            calls.append(name)
            return call(*args)

        monkeypatch.setattr(StepRunner, name, noted)
    moves: list[int] = []
    make_due = StepMoves.make_due
    monkeypatch.setattr(StepMoves, "make_due", lambda *args: moves.append(1) or make_due(*args))  # type: ignore[func-returns-value]
    job = Job()
    with fit(job) as room:
        calls.clear()
        moves.clear()
        with room.step():
            job.step()
    assert not calls and not takeovers
    assert len(moves) > LAYERS
    compare(fit, None)
    assert not takeovers


def write(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


def write_to_a_view(tensor: torch.Tensor) -> None:
    tensor.data[: ROWS // 2].zero_()


def write_by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[:, 0] = 0.25


@pytest.mark.parametrize("touch", [write, write_to_a_view, write_by_numpy])
def test_autograd_finds_what_the_program_has_written_meanwhile(fit: Any, touch: Touch, takeovers: list[str]) -> None:
    compare(fit, touch)
    assert takeovers == ["FOLLOWING_PLAN"]


def test_a_tensor_that_was_written_in_place_is_refused_as_without_a_room(fit: Any) -> None:
    job = Job()
    with fit(job) as room:
        says = r"modified by an inplace operation.* Hint: enable anomaly detection"
        with pytest.raises(RuntimeError, match=says), room.step():
            job.step(lambda tensor: tensor.detach().add_(1))
        job.optimizer.zero_grad()
        with room.step():
            job.step()
        assert room.journal().steps[-1].mode is Mode.PLANNED


@pytest.mark.parametrize("move", ["_offload", "_release", "_reload"])
@pytest.mark.parametrize("position", [0, 3, 5])
def test_the_machine_goes_on_where_a_move_was_not_made_as_planned(
    fit: Any, move: str, position: int, takeovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any of the moves of one kind in a step."""
    make, count = getattr(PlannedMoves, move), [0]

    def fail(moves: PlannedMoves, *args: Any) -> bool:
        count[0] += 1
        return count[0] != position + 1 and make(moves, *args)

    job, expected = Job(), Job().train(None)
    with fit(job) as room:
        monkeypatch.setattr(PlannedMoves, move, fail)
        found = job.train(None, room)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        records = room.journal().steps[-STEPS:]
        assert [record.mode for record in records] == [Mode.PLANNED] * STEPS
        assert takeovers == ["FOLLOWING_PLAN"]
        assert all((record.peak_bytes or 0) <= room.budget_bytes for record in records)


def test_a_step_that_saves_more_than_its_trace_leaves_the_plan_with_storages_away(
    fit: Any, takeovers: list[str]
) -> None:
    job, expected = Job(), Job().train(save_more)
    with fit(job) as room:
        found = job.train(save_more, room)
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
        assert [record.mode for record in room.journal().steps[-STEPS:]] == [Mode.PLANNED, Mode.DRIFTED, Mode.PLANNED]


def test_a_storage_that_numpy_shares_stays_and_the_others_leave(fit: Any, takeovers: list[str]) -> None:
    job, other = Job(), Job()
    with fit(job) as room:
        (first, *_) = room.planned.trace.saves
        assert first.storage in room.planned.candidate.copied_storages
        job.model.load_state_dict(job.start)
        torch.manual_seed(5)
        before = room.journal().steps[-1].offloaded_bytes
        with room.step():
            job.step(is_shared=True)
        record = room.journal().steps[-1]
        assert 0 < record.offloaded_bytes < before
        assert "NumPy" in record.note
    assert not takeovers
    torch.manual_seed(5)
    other.step(is_shared=True)
    assert all(torch.equal(*pair) for pair in zip(job.model.parameters(), other.model.parameters(), strict=True))


def save_more(tensor: torch.Tensor) -> None:
    tensor.sin().sum().backward(retain_graph=True)


def test_a_save_that_may_be_of_another_step_belongs_to_the_machine(
    fit: Any, takeovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two kinds of step are known, and one more op comes before a save than in either."""
    monkeypatch.setattr(PlanningTimes, "quick_seconds", 0.0)  # a kind is planned as soon as it recurs
    job, other = Job(), Job()
    with fit(job) as room:
        cache = room._modes._cache
        for index in range(24):
            with room.step():
                job.step(save_more if index % 2 else None)
            if len(cache.entries) > 1:
                break
        assert len(cache.entries) > 1
        while cache.varies:
            with room.step():
                job.step()
        job.model.load_state_dict(job.start)
        takeovers.clear()
        torch.manual_seed(5)
        with room.step():
            job.step(shows=True)
        record = room.journal().steps[-1]
        assert record.mode is Mode.PLANNED and (record.peak_bytes or 0) <= room.budget_bytes
        assert takeovers == ["FOLLOWING_PLAN"]
    torch.manual_seed(5)
    other.step(shows=True)
    assert all(torch.equal(*pair) for pair in zip(job.model.parameters(), other.model.parameters(), strict=True))


def test_a_graph_that_outlives_its_step_is_taken_over(fit: Any, takeovers: list[str]) -> None:
    def run(room: Room | None) -> list[torch.Tensor]:
        job.model.load_state_dict(job.start)
        torch.manual_seed(7)
        with contextlib.nullcontext() if room is None else room.step():
            loss = job.model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        gradients = [each.grad.clone() for each in job.model.parameters()]  # type: ignore[union-attr]
        job.optimizer.zero_grad()
        return gradients

    job = Job()
    expected = run(None)
    with fit(job) as room:
        found = run(room)
        assert takeovers == ["FOLLOWING_PLAN"]
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_what_is_given_up_before_its_moves_leaves_nothing_behind(fit: Any, takeovers: list[str]) -> None:
    job = Job()
    with fit(job) as room:
        with room.step():
            job.model(torch.randn(ROWS, WIDTH))  # freed at once, while copies are under way
        with room.step():
            job.step()
        assert room.journal().steps[-1].mode is Mode.PLANNED
    assert not takeovers
