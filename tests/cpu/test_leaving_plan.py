"""Rooms that keep several plans: steps that turn out to be others, or larger, in their middle."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.hooks.input_guard import Inputs, observe_inputs
from elbowroom.hooks.ledgers import make_ledger
from elbowroom.ir.events import StorageNeeded
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.machine import Machine
from elbowroom.residency.plan_then_online import Policy as Guided
from elbowroom.residency.policies.lru import Policy as Lru
from elbowroom.room import Room
from elbowroom.running_step import GROWTH
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.step_context import StepContext
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.step_storages import StepStorages

WIDTH = 32


def make(layers: int = 6, drop: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    parts = [each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Dropout(drop))]
    model = nn.Sequential(*parts)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> None:
    model(torch.randn(rows, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, budget: int, **options: Any) -> Room:
    return elbowroom.fit(
        model,
        optimizer,
        budget,
        **(
            {
                "min_offload_bytes": 1,
            }
            | options
        ),
    )


def test_a_plan_drops_what_this_step_does_not_have(profile: HardwareProfile) -> None:
    """A step that has just gone over to another plan, or whose storage was freed early."""
    ledger = make_ledger(torch.device("cpu"))
    environment = StepEnvironment(
        device=torch.device("cpu"),
        budget_bytes=1 << 20,
        ledger=ledger,
        transfers=None,  # type: ignore[arg-type]
        list_residents=list,
        profile=profile,
        history=AccessHistory(),
        policy="lru",
        min_bytes=1,
    )
    storages = StepStorages(environment)
    machine = Machine(CapacityFirst(storages.may_move))
    state = StepState(
        phase=Phase.MANAGED,
        storages=storages,
        machine=machine,
        segments=[],
        watcher=types.SimpleNamespace(busy_seconds=0.0),
        saved_tensors=None,
        candidates=(),
    )
    context = StepContext(state, environment)
    decision = Decision(storage=73, gap=0, choice=Choice.RECOMPUTE, leave=1, release=1, back=9, segment=0)
    segment = Segment(ops=(1,), outputs=(73,), leaves=())
    plan = Plan(trace_digest="", strategy="", budget_bytes=1, decisions=(decision,), segments=(segment,))
    guide = Guided(Lru(context, AccessHistory()), plan)
    assert list(guide.decide(StorageNeeded(-1, 5))) == []


@pytest.mark.parametrize("strategy", ["recompute_all", "offload_all"])
def test_a_plan_that_moves_nothing_does_not_let_a_larger_step_by(strategy: str, profile: HardwareProfile) -> None:
    """With a strategy of one's own a plan may be empty, and nothing watched a step that was another one."""
    model, optimizer = make()
    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(3):
            with room.step():
                step(model, optimizer, 1024)
        assert room.planned is not None
        budget = room.planned.forecast.peak_bytes // 2
    model, optimizer = make()
    with fit(model, optimizer, budget, profile=profile, strategy=strategy, min_offload_bytes=1 << 16) as room:
        for rows in [16] * 5 + [1024] + [16] * 3:
            try:
                with room.step():
                    step(model, optimizer, rows)
            except Infeasible:
                optimizer.zero_grad()
        assert room.planned is not None and not room.planned.plan.decisions
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget


def test_what_was_made_asleep_is_counted_at_waking(profile: HardwareProfile) -> None:
    """The program holds what autograd does not; and no op touches it any more."""
    model, optimizer = make(drop=0.0)

    def held_step(rows: int, is_odd: bool) -> None:
        x = torch.randn(rows, WIDTH)
        with torch.no_grad():
            held = [(x * index).sin() for index in range(12)]  # what it keeps for later
        y = model(x)
        if is_odd:
            y = torch.tanh(torch.sigmoid(model(y * 1.5)))
        loss = y.square().mean()
        loss.backward()
        del held
        optimizer.step()
        optimizer.zero_grad()

    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(4):
            with room.step():
                held_step(512, True)
        assert room.planned is not None
        whole = room.planned.forecast.peak_bytes
    for share in (0.75, 0.8, 0.85, 0.9):
        budget = int(share * whole)
        model, optimizer = make(drop=0.0)
        with fit(model, optimizer, budget, profile=profile, strategy="offload_all") as room:
            for index in range(8):
                with room.step():
                    held_step(512, index == 5)
            records = room.journal().steps
            assert records[5].mode is Mode.DRIFTED
            assert max(record.peak_bytes or 0 for record in records) <= budget, share


def test_a_kind_that_no_plan_fits_goes_on_without_one(profile: HardwareProfile) -> None:
    """It ran within the budget before it recurred; now that it does, nobody refuses it."""
    model, optimizer = make()
    kinds = [64] * 6 + [64 if index % 3 == 0 else 256 for index in range(6, 40)]
    with fit(model, optimizer, 360_000, profile=profile, strategy="recompute_all") as room:
        for rows in kinds:
            with room.step():
                step(model, optimizer, rows)
        records = room.journal().steps
    assert max(record.peak_bytes or 0 for record in records) <= 360_000
    captures = [record.step for record in records if record.mode is Mode.CAPTURE]
    assert len(captures) <= 8, "nor is it captured again and again"


def test_ragged_batches_of_one_size_are_one_kind(profile: HardwareProfile) -> None:
    """Each jagged tensor has a shape of its own, which is like no other."""
    torch.manual_seed(3)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(6):
            with room.step():
                rows = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(4, 8)], layout=torch.jagged)
                model(rows).values().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert [record.mode for record in room.journal().steps[1:]] == [Mode.PLAIN] * 5
        assert len(room._cache.entries[0].calls) == 1


def test_a_nested_batch_can_be_looked_at() -> None:
    seen: list[Inputs] = []
    model = nn.Linear(8, 8)
    with observe_inputs(model, seen.append, lambda tensors: False):
        model(torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(4, 8)]))
    assert seen == [Inputs(((torch.Size((56,)), torch.float32),), True)]


def test_a_step_without_a_backward_pass_is_not_planned_ahead(profile: HardwareProfile) -> None:
    model, optimizer = make()

    def look() -> None:
        with torch.no_grad():
            model(torch.randn(64, WIDTH))

    with fit(model, optimizer, 1 << 40, profile=profile, step=look) as room:
        assert room.planned is None
        for rows in [0] * 3 + [16, 64] * 8:
            with room.step():
                step(model, optimizer, rows) if rows else look()
        assert room.planned is not None


def test_what_several_dropped_storages_share_is_counted_once(profile: HardwareProfile) -> None:
    """A step that fits as it is wakes when much of it was dropped, to be computed again together."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def chained(is_odd: bool) -> None:
        x = torch.randn(256, WIDTH)
        for layer in model:
            h = layer(x)
            for _ in range(6):
                h = torch.tanh(h * 1.5)
            x = x + h
        (torch.tanh(x) * torch.sigmoid(x) if is_odd else x.square()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(4):
            with room.step():
                chained(True)
        assert room.planned is not None
        plain = room.planned.forecast.peak_bytes
    with fit(model, optimizer, int(1.3 * plain), profile=profile, strategy="recompute_all", policy="dtr") as room:
        for index in range(10):
            with room.step():
                chained(index == 6)
        record = room.journal().steps[6]
        assert record.mode is Mode.DRIFTED and record.recomputed


@pytest.mark.parametrize("backward_first", [False, True])
def test_a_plain_step_that_calls_its_model_again(backward_first: bool, profile: HardwareProfile) -> None:
    """The second call tells that it is larger; the first one's activations are there, or are gone."""

    def twice(times: int) -> None:
        if backward_first:
            for _ in range(times):
                model(torch.randn(512, WIDTH)).square().mean().backward()
        else:
            losses = [model(torch.randn(512, WIDTH)).square().mean() for _ in range(times)]
            torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make(drop=0.0)
    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(4):
            with room.step():
                twice(1)
        assert room.planned is not None
        budget = int(1.2 * room.planned.forecast.peak_bytes)
    model, optimizer = make(drop=0.0)
    with fit(model, optimizer, budget, profile=profile) as room:
        for index in range(8):
            with room.step():
                twice(2 if index == 6 else 1)
            optimizer.zero_grad()
        assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget


@pytest.mark.parametrize("strategy", ["recompute_all", "offload_all"])
def test_a_step_whose_saves_its_program_takes_itself(strategy: str, profile: HardwareProfile) -> None:
    """Its own hooks keep all that the plan counts on to leave, and nothing else tells that it stays."""
    model, optimizer = make(layers=40, drop=0.0)

    def step(is_own: bool) -> None:
        own = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
        with own if is_own else contextlib.nullcontext():
            loss = model(torch.randn(512, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()

    with fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(3):
            with room.step():
                step(False)
            optimizer.zero_grad()
        assert room.planned is not None
        budget = room.planned.forecast.peak_bytes // 2
    with fit(model, optimizer, budget, profile=profile, strategy=strategy) as room:
        for index in range(7):
            refusal = contextlib.suppress(Infeasible) if index == 5 else contextlib.nullcontext()
            with refusal, room.step():
                step(index == 5)
            optimizer.zero_grad()
        records = room.journal().steps
    assert [record.mode for record in records[2:5]] == [Mode.PLANNED] * 3
    assert max(record.peak_bytes or 0 for record in records) <= budget


@pytest.mark.parametrize("grows_by", ["ops", "calls"])
def test_a_plain_step_is_watched_from_where_it_grows(grows_by: str, profile: HardwareProfile) -> None:
    """The model's first calls are as ever; what comes after them would not fit the budget."""

    def train(room: Room | None, job: tuple[nn.Module, torch.optim.Optimizer], counts: list[int]) -> list[float]:
        losses = []
        for index, count in enumerate(counts):
            torch.manual_seed(index)
            with room.step() if room is not None else contextlib.nullcontext():
                y = torch.randn(2048, WIDTH)
                for _ in range(16 + count if grows_by == "calls" else 16):
                    y = job[0](y)
                for _ in range(0 if grows_by == "calls" else 6 * count):
                    y = torch.tanh(y * 1.5)
                y.square().mean().backward()
                job[1].step()
                job[1].zero_grad()
                losses.append(float(y.detach().sum()))
        return losses

    counts = [0, 0, 0, 0, 60, 0, 60, 60, 0]
    expected = train(None, make(layers=1, drop=0.0), counts)
    job = make(layers=1, drop=0.0)
    with fit(*job, 1 << 40, profile=profile) as room:
        train(room, job, counts[:3])
        assert room.planned is not None
        budget = 3 * room.planned.forecast.peak_bytes
    job = make(layers=1, drop=0.0)
    with fit(*job, 1 << 40, profile=profile, mode="dynamic") as room:
        train(room, job, [60])
        assert (room.journal().peak_bytes or 0) > budget
    job = make(layers=1, drop=0.0)
    with fit(*job, budget, profile=profile) as room:
        assert train(room, job, counts) == expected
        records = room.journal().steps
    assert records[3].mode is Mode.PLAIN and records[4].mode is Mode.DRIFTED
    assert records[4].offloaded_bytes + records[4].recomputed > 0
    assert max(record.peak_bytes or 0 for record in records) <= budget


@pytest.mark.usefixtures("whole_ops")
def test_a_step_that_is_refused_from_where_it_grows_is_watched_from_its_beginning(profile: HardwareProfile) -> None:
    """By the time that it grows, what it has saved cannot leave; in the next step it can."""

    def train(room: Room | None, grows: bool) -> float:
        with room.step() if room is not None else contextlib.nullcontext():
            y = job[0](torch.ones(2048, WIDTH))
            for _ in range(40 if grows else 20):
                y = torch.tanh(y * 1.5)
            y.square().mean().backward()
            return float(y.detach().sum())

    job = make(layers=1, drop=0.0)
    with fit(*job, 1 << 40, profile=profile) as room:
        for _ in range(3):
            train(room, False)
        assert room.planned is not None
        allowed_bytes = int(GROWTH * room.planned.activation_bytes) + (1 << 20)
        budget = room.planned.forecast.peak_bytes + allowed_bytes + 2048 * WIDTH * 4
        expected = train(None, True)
    job = make(layers=1, drop=0.0)
    with fit(*job, budget, profile=profile) as room:
        for _ in range(3):
            train(room, False)
        assert room.journal().steps[-1].mode is Mode.PLAIN
        refusals = 0
        for _ in range(4):
            try:
                assert train(room, True) == expected
            except Infeasible:
                refusals += 1
        assert refusals == 1 and max(record.peak_bytes or 0 for record in room.journal().steps) <= budget
        assert room.journal().steps[-1].offloaded_bytes + room.journal().steps[-1].recomputed > 0


@pytest.mark.parametrize("adds_a_group", [False, True], ids=["unfrozen", "added"])
def test_steps_are_watched_again_when_more_parameters_are_trained(adds_a_group: bool, profile: HardwareProfile) -> None:
    """The first such step would be refused: by the time that it allocates more, what it has saved cannot leave."""

    def run(budget_bytes: int | None) -> tuple[list[torch.Tensor], Room | None]:
        model, _ = make(layers=8, drop=0.0)
        body, head = model[:-3], model[-3:]
        body.requires_grad_(False)
        optimizer = torch.optim.AdamW((head if adds_a_group else model).parameters())
        room = None if budget_bytes is None else fit(model, optimizer, budget_bytes, profile=profile)
        for index in range(10):
            if index == 5:
                body.requires_grad_(True)
                if adds_a_group:
                    optimizer.add_param_group({"params": list(body.parameters())})
            torch.manual_seed(index)
            with contextlib.nullcontext() if room is None else room.step():
                step(model, optimizer, 1024)
        if room is not None:
            room.detach()
        return list(model.parameters()), room

    expected, _ = run(None)
    budget_bytes = 900000
    found, room = run(budget_bytes)
    assert all(map(torch.equal, found, expected)) and room is not None
    modes = [record.mode for record in room.journal().steps]
    assert modes[4] is Mode.PLAIN and Mode.PLAIN not in modes[5:]
    assert (room.journal().peak_bytes or 0) <= budget_bytes


@pytest.mark.parametrize("kinds", ["eet", "tee", "etee"])
@pytest.mark.parametrize("budget_bytes", [100 << 10, 1 << 40], ids=["tight", "ample"])
def test_evaluations_in_steps_leave_training_its_plan(kinds: str, budget_bytes: int, profile: HardwareProfile) -> None:
    def run(room: Room | None) -> list[torch.Tensor]:
        for kind in kinds * 5:
            with contextlib.nullcontext() if room is None else room.step(), torch.set_grad_enabled(kind == "t"):
                step(model, optimizer, 64) if kind == "t" else model(torch.randn(64, WIDTH))
        return [each.detach().clone() for each in model.parameters()]

    model, optimizer = make()
    expected = run(None)
    model, optimizer = make()
    training, evaluation = (Mode.PLANNED, Mode.DYNAMIC) if budget_bytes < 1 << 40 else (Mode.PLAIN, Mode.PLAIN)
    with fit(model, optimizer, budget_bytes, profile=profile) as room:
        assert all(map(torch.equal, run(room), expected))
        modes = [record.mode for record in room.journal().steps[-3 * len(kinds) :]]
        assert modes == [training if kind == "t" else evaluation for kind in kinds * 3]
        (entry,) = room._cache.entries
        assert {inputs.has_gradients for inputs in entry.calls} == {True}
