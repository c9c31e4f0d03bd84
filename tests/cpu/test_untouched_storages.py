"""What the plan of a sleeping step leaves alone: nobody is told when it goes, and the machine does not know of it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.events import Event, PressureRaised, StorageNeeded, StorageSaved
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.residency.machine import Machine, State
from elbowroom.room import Room
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.packed_tensor import PackedTensor
from elbowroom.runtime.planned_moves import PlannedMoves
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_runner import StepRunner
from tests.pressure import EVERYTHING

pytestmark = pytest.mark.usefixtures("activations_only")

WIDTH, ROWS, LAYERS = 128, 1024, 8


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def find_budget(profile: HardwareProfile, share: float) -> int:
    """So far down from what a plain step takes to the least."""
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(4):
            with room.step():
                take(model, optimizer)
        assert room.planned is not None
        return room.planned.forecast.peak_bytes - int(share * room.planned.activation_bytes)


def take(model: nn.Module, optimizer: torch.optim.Optimizer, extra_rows: int = 0) -> torch.Tensor:
    y = model(torch.randn(ROWS, WIDTH))
    held = torch.randn(extra_rows, WIDTH)  # no save tells of it
    loss = y.square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach() + 0 * held.sum()


def settle(room: Room, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Until steps are planned, and are not watched any more."""
    for _ in range(12):
        with room.step():
            take(model, optimizer)
    assert [record.mode for record in room.journal().steps[-5:]] == [Mode.PLANNED] * 5


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each saved tensor that Python was asked about, whether it may move."""
    answers: list[bool] = []
    save = StepRunner.save

    def noted(self: StepRunner, index: int, tensor: torch.Tensor, saved: SavedStorage | None) -> PackedTensor | None:
        packed = save(self, index, tensor, saved)
        answers.append(packed is not None)
        return packed

    monkeypatch.setattr(StepRunner, "save", noted)
    return answers


def test_the_machine_knows_of_what_the_plan_touches(
    profile: HardwareProfile, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    told: set[int] = set()
    feed = Machine.feed

    def noted(machine: Machine, event: Event) -> Any:
        if isinstance(event, StorageSaved | StorageNeeded):
            told.add(event.storage)
        return feed(machine, event)

    with elbowroom.fit(
        model, optimizer, find_budget(profile, 0.3), profile=profile, strategy="auto:effort=0.1"
    ) as room:
        settle(room, model, optimizer)
        monkeypatch.setattr(Machine, "feed", noted)
        asked.clear()
        with room.step():
            take(model, optimizer)
        record = room.journal().steps[-1]
        assert room.planned is not None
        candidate = room.planned.candidate
        touched, copied = candidate.plan_storages, candidate.copied_storages
    assert record.mode is Mode.PLANNED
    assert record.offloaded_bytes + record.recomputed > 0
    assert sum(asked) < record.saves
    assert told - {-1} == touched - copied
    assert copied


def test_nothing_of_a_step_waits_for_the_garbage_collector(profile: HardwareProfile, asked: list[bool]) -> None:
    model, optimizer = make()
    with elbowroom.fit(
        model, optimizer, find_budget(profile, 0.3), profile=profile, strategy="auto:effort=0.1"
    ) as room:
        settle(room, model, optimizer)
        gc.collect()
        gc.disable()
        try:
            asked.clear()
            with room.step():
                runner = weakref.ref(room._modes.runner)  # type: ignore[arg-type]
                take(model, optimizer)
            assert room.journal().steps[-1].mode is Mode.PLANNED
            with room.step():
                take(model, optimizer)
            assert runner() is None or not runner().state.storages.by_id  # type: ignore[union-attr]
        finally:
            gc.enable()


@pytest.mark.parametrize("times", [1, 2])
def test_a_graph_that_outlives_its_step(times: int, profile: HardwareProfile, asked: list[bool]) -> None:
    """Backpropagated after it, by what it left as it was and by what it moved."""

    def train(room: Room | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for index in range(2):
            asked.clear()
            if room is None:
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
            else:
                with room.step():
                    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
                # The one after it is captured: this may be what steps are like from now on.
                assert index or len(asked) < room.journal().steps[-1].saves
            for _ in range(times):
                loss.backward(retain_graph=True)
            found += [loss.detach(), *(each.grad.clone() for each in model.parameters())]
            optimizer.zero_grad()
            del loss
        return found

    model, optimizer = make()
    for _ in range(3):
        take(model, optimizer)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(None)
    model, optimizer = make()
    with elbowroom.fit(
        model, optimizer, find_budget(profile, 0.3), profile=profile, strategy="auto:effort=0.1"
    ) as room:
        settle(room, model, optimizer)
        model.load_state_dict(start)
        found = train(room)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_what_is_needed_stays_while_the_step_wakes(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload that is due at a need finds no room, and everything that may leave does: but not what is needed."""
    calls, at = [0], [0]

    def press_first(bring_back: Callable[[ActionExecutor, Any], None]) -> Callable[[ActionExecutor, Any], None]:
        def noted(executor: ActionExecutor, what: Any) -> None:
            calls[0] += 1
            if calls[0] == at[0]:
                executor._state.saved_tensors.leave("a test")
                executor.perform(executor._machine.feed(PressureRaised(EVERYTHING, 0)))
            bring_back(executor, what)

        return noted

    def train(room: Room | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for at[0] in range(1, 13):
            calls[0] = 0
            if room is None:
                found.append(take(model, optimizer))
                continue
            with room.step():
                found.append(take(model, optimizer))
            at[0] = 0
            for _ in range(3):  # until it is planned again
                state = torch.get_rng_state(), {name: each.clone() for name, each in model.state_dict().items()}
                with room.step():
                    take(model, optimizer)
                torch.set_rng_state(state[0])
                model.load_state_dict(state[1])
        return [*found, *(each.detach().clone() for each in model.parameters())]

    model, optimizer = make()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(None)
    model, optimizer = make()
    monkeypatch.setattr(ActionExecutor, "_reload", press_first(ActionExecutor._reload))
    monkeypatch.setattr(ActionExecutor, "_recompute", press_first(ActionExecutor._recompute))
    options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 1}
    with elbowroom.fit(model, optimizer, find_budget(profile, 0.5), strategy="offload_all", **options) as room:
        settle(room, model, optimizer)
        model.load_state_dict(start)
        found = train(room)
        woken = [record for record in room.journal().steps[12:] if record.mode is Mode.DRIFTED]
    assert len(woken) > 6
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_a_reload_that_comes_early_may_wait(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds no room at the tick that it was planned for, and there is some when it is needed."""
    refused, reload, reload_as_planned = list[int](), ActionExecutor._reload, PlannedMoves._reload

    def refuse_as_planned(moves: PlannedMoves, storage: int) -> bool:
        return not is_busy[0] and reload_as_planned(moves, storage)

    def refuse(executor: ActionExecutor, saved: SavedStorage) -> None:
        has_to_wait = saved.find_released() is None and executor._machine.state(saved.id) is State.ARRIVING
        if is_busy[0] and has_to_wait:
            refused.append(saved.id)
            raise Infeasible(needed_bytes=2, budget_bytes=1, op="a reload", is_whole_step=False)
        reload(executor, saved)

    def train(room: Room | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for is_busy[0] in (True, False, True):
            with room.step() if room is not None else contextlib.nullcontext():
                found.append(take(model, optimizer))
        return [*found, *(each.detach().clone() for each in model.parameters())]

    model, optimizer = make()
    for _ in range(3):
        take(model, optimizer)
    is_busy, start = [False], {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(None)
    model, optimizer = make()
    monkeypatch.setattr(ActionExecutor, "_reload", refuse)
    monkeypatch.setattr(PlannedMoves, "_reload", refuse_as_planned)
    with elbowroom.fit(model, optimizer, find_budget(profile, 0.5), profile=profile, strategy="capuchin") as room:
        settle(room, model, optimizer)
        model.load_state_dict(start)
        found = train(room)
    assert len(refused) > 2
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_bystanders_leave_once_the_step_wakes(share: float, profile: HardwareProfile, asked: list[bool]) -> None:
    """Something is held that no plan knows of; so much that it takes more than what was to move anyway."""
    budget = find_budget(profile, share)

    def train(room: Room | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for rows in (0, LAYERS * ROWS, 0):
            if room is None:
                found.append(take(model, optimizer, rows))
            else:
                with room.step():
                    found.append(take(model, optimizer, rows))
        return [*found, *(each.detach().clone() for each in model.parameters())]

    model, optimizer = make()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    expected = train(None)
    model, optimizer = make()
    options: dict[str, Any] = {"profile": profile, "min_offload_bytes": 1}
    with elbowroom.fit(model, optimizer, budget, strategy="auto:effort=0.1", **options) as room:
        settle(room, model, optimizer)
        moved = room.journal().steps[-1]
        model.load_state_dict(start)
        found = train(room)
        records = room.journal().steps[-3:]
    assert [record.mode for record in records][1] is Mode.DRIFTED
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert max(record.peak_bytes or 0 for record in records) <= budget
    assert records[1].offloaded_bytes > moved.offloaded_bytes
