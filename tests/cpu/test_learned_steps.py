"""A room that takes over what an earlier one has learned follows its plan from the first step, with the same bits."""

from __future__ import annotations

import copy
import io
import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode

BUDGET = 3 << 20
QUICK: dict[str, Any] = {"strategy": "recompute_all"}


def make(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())))
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, room: Any, indices: range, rows: int = 1024) -> list[str]:
    """Run steps, in a room or without; their losses in hexadecimal."""
    width = next(model.parameters()).shape[1]
    losses = []
    for index in indices:
        batch = torch.randn(rows, width, generator=torch.Generator().manual_seed(index))
        with room.step() if room is not None else torch.enable_grad():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


@pytest.fixture(scope="module")
def learned(profile: HardwareProfile) -> dict[str, Any]:
    """A checkpoint after four steps: model, optimizer and room, as `torch.save` writes them."""
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, BUDGET, profile=profile, **QUICK) as room:
        train(model, optimizer, room, range(4))
        assert room.journal().steps[-1].mode is Mode.PLANNED
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "room": room.state_dict()}
        file = io.BytesIO()
        torch.save(state, file)
    file.seek(0)
    return dict(torch.load(file, weights_only=True))


def resume(learned: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = make()
    model.load_state_dict(learned["model"])
    optimizer.load_state_dict(learned["optimizer"])
    return model, optimizer


def test_a_resumed_job_follows_its_plan_from_the_first_step(learned: dict[str, Any], profile: HardwareProfile) -> None:
    model, optimizer = make()
    losses = train(model, optimizer, None, range(8))
    resumed, its_optimizer = resume(learned)
    with elbowroom.fit(resumed, its_optimizer, BUDGET, profile=profile, **QUICK) as room:
        room.load_state_dict(json.loads(json.dumps(learned["room"])))
        assert train(resumed, its_optimizer, room, range(4, 8)) == losses[4:]
        steps = room.journal().steps
        assert [step.mode for step in steps] == [Mode.PLANNED] * 4
        assert max(step.peak_bytes or 0 for step in steps) <= BUDGET
        assert steps[0].offloaded_bytes + steps[0].recomputed > 0  # the plan does something
    for one, other in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_budget_or_machine_needs_another_plan(learned: dict[str, Any], profile: HardwareProfile) -> None:
    for budget, machine in ((BUDGET - (1 << 18), "same"), (BUDGET, "another"), (1 << 30, "same")):
        state = copy.deepcopy(learned["room"])
        if machine == "another":
            state["op_times"]["machine"] = machine
        resumed, its_optimizer = resume(learned)
        with elbowroom.fit(resumed, its_optimizer, budget, profile=profile, **QUICK) as room:
            room.load_state_dict(state)
            assert room.planned is not None
            assert room.planned.plan.budget_bytes == budget
            train(resumed, its_optimizer, room, range(4, 6))
            steps = room.journal().steps
            assert {step.mode for step in steps} <= {Mode.PLANNED, Mode.PLAIN}
            assert max(step.peak_bytes or 0 for step in steps) <= budget


def test_the_plan_of_another_model_changes_nothing(learned: dict[str, Any], profile: HardwareProfile) -> None:
    model, optimizer = make(width=48)
    losses = train(model, optimizer, None, range(5))
    other, its_optimizer = make(width=48)
    with elbowroom.fit(other, its_optimizer, BUDGET, profile=profile, **QUICK) as room:
        room.load_state_dict(learned["room"])
        assert train(other, its_optimizer, room, range(5)) == losses
        assert room.journal().steps[0].mode is Mode.CAPTURE  # and not a plan of other parameters
        assert (room.journal().peak_bytes or 0) <= BUDGET


def test_damaged_and_foreign_states(
    learned: dict[str, Any], profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, BUDGET, profile=profile, **QUICK) as room:
        for damaged in ({}, [], {**learned["room"], "steps": [1]}, {**learned["room"], "more": 1}):
            with pytest.raises(TraceError):
                room.load_state_dict(damaged)  # type: ignore[arg-type]
        state = copy.deepcopy(learned["room"])
        state["steps"][0]["costs"]["trace_digest"] = "0"
        with pytest.raises(TraceError, match=r"\$.steps\[0\].*another trace"):
            room.load_state_dict(state)
        room.load_state_dict({**learned["room"], "formats": {"LearnedSteps": 99}})
        assert "99" in caplog.text
        assert room.planned is None
        with room.step(), pytest.raises(UsageError, match="inside a step"):
            room.load_state_dict(learned["room"])
    with pytest.raises(UsageError, match="detached"):
        room.load_state_dict(learned["room"])


def test_op_times_come_along(
    learned: dict[str, Any], profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """On a machine without a cache of its own, ops of steps that have not run are priced as they were measured."""
    monkeypatch.setenv("ELBOWROOM_OP_TIME_STORE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("elbowroom.hardware.past_times._list_machines", lambda _: [profile.name])
    state = copy.deepcopy(learned["room"])
    state["op_times"]["times"] = [{"key": "an op", "seconds": 0.25, "steps": 3}]
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, BUDGET, profile=profile, **QUICK) as room:
        room.load_state_dict(state)
        times = {each["key"]: each["seconds"] for each in room.state_dict()["op_times"]["times"]}
        assert times["an op"] == 0.25


def test_a_plan_of_other_batches_that_keeps_everything_is_not_trusted(profile: HardwareProfile) -> None:
    """A step that fits is not watched; the first one of a room is, since it may be a larger one."""
    budget = 48 << 20
    model, optimizer = make()
    with elbowroom.fit(model, optimizer, budget, profile=profile, op_time_store=False) as room:
        train(model, optimizer, room, range(4))
        assert room.journal().steps[-1].mode is Mode.PLAIN
        small = room.state_dict()
        again, its_optimizer = make()
    with elbowroom.fit(again, its_optimizer, budget, profile=profile, op_time_store=False) as room:
        room.load_state_dict(small)
        train(again, its_optimizer, room, range(3))
        assert [step.mode for step in room.journal().steps] == [Mode.PLANNED, Mode.PLAIN, Mode.PLAIN]
    other, its_optimizer = make()
    plain, plain_optimizer = make()
    with elbowroom.fit(other, its_optimizer, budget, profile=profile, op_time_store=False) as room:
        room.load_state_dict(small)
        losses = train(other, its_optimizer, room, range(4), rows=1 << 14)
        for step in room.journal().steps:
            assert step.mode is not Mode.PLAIN and step.peak_bytes is not None and step.peak_bytes <= budget
    assert losses == train(plain, plain_optimizer, None, range(4), rows=1 << 14)
