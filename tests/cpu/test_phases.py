"""The phases that steps go through, and that no step goes through others."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import InternalError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.room import Room
from elbowroom.runtime.phase import NEXT_PHASES, Phase
from elbowroom.runtime.step_state import StepState

CAPTURED = [Phase.SETTLING, Phase.CLOSED]
PLANNED = [Phase.DRAINING, Phase.CLOSED]
MANAGED = [Phase.MANAGED, Phase.SETTLING, Phase.CLOSED]

Visited = list[Phase]


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> Visited:
    """The phases that are entered."""
    found: Visited = []
    enter = StepState.enter

    def noted(state: StepState, phase: Phase) -> None:
        enter(state, phase)
        found.append(phase)

    monkeypatch.setattr(StepState, "enter", noted)
    return found


def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(64, 64), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def run(room: Room, model: nn.Module, rows: int, visited: Visited, *, backward: bool = True) -> Visited:
    """Run one step; return the phases that it has entered when it is over."""
    visited.clear()
    with room.step():
        loss = model(torch.ones(rows, 64)).square().mean()
        if backward:
            loss.backward()
    entered = list(visited)
    model.zero_grad()
    return entered


def test_a_step_without_a_plan_is_managed_when_room_is_short(profile: HardwareProfile, visited: Visited) -> None:
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, 1_500_000, mode="dynamic", min_offload_bytes=1, profile=profile) as room:
        assert run(room, model, 64, visited) == [Phase.SETTLING, Phase.CLOSED]
        assert run(room, model, 640, visited) == MANAGED
        assert room.journal().steps[-1].offloaded_bytes + room.journal().steps[-1].recomputed > 0


def test_a_step_leaves_its_plan_once(profile: HardwareProfile, visited: Visited) -> None:
    model, optimizer = make()
    options = {"strategy": "offload_all", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, optimizer, 1 << 30, **options) as room:
        entered = [run(room, model, 64, visited) for _ in range(3)]
        assert [record.mode for record in room.journal().steps] == [Mode.CAPTURE, Mode.PLANNED, Mode.PLANNED]
        assert entered == [CAPTURED, PLANNED, PLANNED]
        assert run(room, model, 65, visited) == MANAGED
        assert room.journal().steps[-1].mode is Mode.DRIFTED


def test_a_graph_outlives_a_planned_step(profile: HardwareProfile, visited: Visited) -> None:
    model, optimizer = make()
    options = {"strategy": "offload_all", "min_offload_bytes": 1, "profile": profile}
    with elbowroom.fit(model, optimizer, 1 << 30, **options) as room:
        for _ in range(3):
            run(room, model, 64, visited)
        visited.clear()
        with room.step():
            loss = model(torch.ones(64, 64)).square().mean()
        assert visited == [Phase.DRAINING]
        loss.backward(retain_graph=True)
        assert visited == [Phase.DRAINING]
        once = [each.grad.clone() for each in model.parameters()]
        loss.backward()  # which the plan does not know
        assert visited == [Phase.DRAINING, Phase.CLOSED]
        assert all(torch.equal(2 * one, each.grad) for one, each in zip(once, model.parameters(), strict=True))


def test_no_other_phase_can_be_entered() -> None:
    for now, then in itertools.product(Phase, Phase):
        state = StepState(
            phase=now, candidates=(), storages=None, machine=None, segments=[], watcher=None, saved_tensors=None
        )  # type: ignore[arg-type]
        if then in NEXT_PHASES[now]:
            state.enter(then)
            assert state.phase is then
        else:
            with pytest.raises(InternalError, match=f"in phase {now.name} cannot enter phase {then.name}"):
                state.enter(then)
            assert state.phase is now
    assert not any(Phase.CAPTURING in following for following in NEXT_PHASES.values())
