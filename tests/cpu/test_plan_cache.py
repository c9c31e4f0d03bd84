"""Steps of several kinds: each has its own plan, is recognised again, and keeps to the budget until it is known."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode, StepRecord
from elbowroom.plan_cache import RECENT
from elbowroom.planner.searching import choice_search
from elbowroom.planning_times import BRIEF, QUICK, SEARCH, PlanningTimes
from elbowroom.room import Room

WIDTH, ROWS = 48, 256
Kind = Any
Made = tuple[nn.Module, torch.optim.Optimizer, Callable[[int, Kind], torch.Tensor]]


def finish(model: nn.Module, optimizer: torch.optim.Optimizer, value: torch.Tensor) -> torch.Tensor:
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return value.detach()


def make_lengths() -> Made:
    """A transformer; the kind of a step is how long its sequences are."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(index: int, kind: Kind) -> torch.Tensor:
        x = torch.randn(8, kind, WIDTH, generator=torch.Generator().manual_seed(index))
        return finish(model, optimizer, model(x).square().mean())

    return model, optimizer, step


def make_boxes() -> Made:
    """A detector: the kind of a step is how large its images are, and each step has another number of boxes."""
    model, optimizer, _ = make_lengths()

    def step(index: int, kind: Kind) -> torch.Tensor:
        x = torch.randn(8, kind, WIDTH, generator=torch.Generator().manual_seed(index))
        boxes = torch.arange(index + 2) % kind
        first = x[0, boxes].sin().mean()
        y = model(x)
        return finish(model, optimizer, y.square().mean() + (y[0, boxes, 0] * first).sin().mean())

    return model, optimizer, step


def make_exits() -> Made:
    """Layers, of which so many are run: all kinds begin alike."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)) for _ in range(9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(index: int, kind: Kind) -> torch.Tensor:
        x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        for layer in list(model)[:kind]:
            x = layer(x)
        return finish(model, optimizer, x.square().mean())

    return model, optimizer, step


def make_branches() -> Made:
    """Saves of the same sizes, of other ops."""
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(index: int, kind: Kind) -> torch.Tensor:
        x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(index))
        for position, layer in enumerate(model):
            x = torch.relu(layer(x) * 1.5) if (position + kind) % 2 else torch.tanh(layer(x))
        return finish(model, optimizer, x.square().mean())

    return model, optimizer, step


def run(make: Callable[[], Made], kinds: Sequence[Kind], room_for: Callable[[Made], Room] | None) -> tuple[Any, Any]:
    """The losses and parameters of a loop over steps of these kinds, and its room, detached."""
    torch.manual_seed(11)
    made = model, _, step = make()
    if room_for is None:
        losses = [step(index, kind) for index, kind in enumerate(kinds)]
        return (losses, list(model.parameters())), None
    losses = []
    with room_for(made) as room:
        for index, kind in enumerate(kinds):
            with room.step():
                losses.append(step(index, kind))
    return (losses, list(model.parameters())), room


@functools.cache
def find_plain_peak(make: Callable[[], Made], kind: Kind, profile: HardwareProfile) -> int:
    """What steps of one kind take without a room."""

    def fit(made: Made) -> Room:
        return elbowroom.fit(made[0], made[1], 1 << 40, profile=profile)

    _, room = run(make, [kind] * 4, fit)
    assert room.planned is not None
    return int(room.planned.forecast.peak_bytes)


def compare(
    make: Callable[[], Made],
    kinds: Sequence[Kind],
    budget: int,
    profile: HardwareProfile,
    strategy: str = QUICK,
    min_offload_bytes: int = 1,
) -> tuple[Room, Sequence[StepRecord]]:
    """Bits and budget, from the first step to the last."""

    def fit(made: Made) -> Room:
        model, optimizer, _ = made
        options: dict[str, Any] = {"strategy": strategy, "min_offload_bytes": min_offload_bytes}
        return elbowroom.fit(model, optimizer, budget, profile=profile, **options)

    (losses, parameters), _ = run(make, kinds, None)
    (own_losses, own_parameters), room = run(make, kinds, fit)
    assert all(torch.equal(*pair) for pair in zip(losses, own_losses, strict=True))
    assert all(torch.equal(*pair) for pair in zip(parameters, own_parameters, strict=True))
    records = room.journal().steps
    peaks = [record.peak_bytes or 0 for record in records]
    assert max(peaks) <= budget, [(record.step, str(record.mode), record.peak_bytes) for record in records]
    return room, records


@pytest.mark.parametrize(
    ("make", "kinds", "strategy", "share"),
    [
        (make_lengths, (24, 40, 64), "auto", 0.7),
        (make_exits, (4, 6, 9), "auto", 0.7),
        (make_branches, (0, 1), "recompute_all", 0.95),  # what only moves is the same in both
    ],
)
@pytest.mark.usefixtures("plans_at_once")
def test_each_kind_of_step_gets_its_plan(
    make: Callable[[], Made], kinds: tuple[Kind, ...], strategy: str, share: float, profile: HardwareProfile
) -> None:
    draw = random.Random(5)
    order = [draw.choice(kinds) for _ in range(24)] + list(kinds) * 4
    budget = int(share * find_plain_peak(make, kinds[-1], profile))
    room, records = compare(make, order, budget, profile, strategy=strategy)
    entries = room._cache.entries
    assert len(entries) == len(kinds), "one plan for each kind"
    assert any(entry.planned.plan.decisions for entry in entries)
    late = records[-2 * len(kinds) :]
    assert {record.mode for record in late} == {Mode.PLANNED}, [(str(each.mode), each.note) for each in records]
    assert any(record.offloaded_bytes or record.recomputed for record in late)


def test_steps_that_never_recur_are_decided_on_as_they_go(profile: HardwareProfile) -> None:
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    room, records = compare(make_lengths, [64 - index for index in range(30)], budget, profile)
    counts = Counter(record.mode for record in records)
    assert counts[Mode.CAPTURE] <= 3, "what does not recur is not captured again and again"
    assert len(room._cache.entries) == 1
    assert counts[Mode.DRIFTED] == RECENT and {record.mode for record in records[-10:]} == {Mode.DYNAMIC}
    assert any(record.offloaded_bytes or record.recomputed for record in records if record.mode is Mode.DRIFTED)


def test_a_kind_that_recurs_among_others_gets_its_plan_once_it_is_worth_a_capture(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured are steps of this kind alone, which the first save tells."""
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    kinds = [64, 64, *(4 + index for index in range(24))]
    kinds += [length for index in range(8) for length in (48, 28 + index)] + [48] * 4
    monkeypatch.setattr("elbowroom.plan_cache.GAIN", 1e9)
    room, records = compare(make_lengths, kinds, budget, profile)
    captured = [kind for kind, record in zip(kinds, records, strict=True) if record.mode is Mode.CAPTURE]
    assert captured == [64, 64, 48]
    assert len(room._cache.entries) == 2
    assert {record.mode for record in records[-3:]} == {Mode.PLANNED}


@pytest.mark.parametrize("odd", [33, 63])
def test_an_odd_step_among_others(odd: int, profile: HardwareProfile) -> None:
    """The last batch of an epoch: it leaves its plan at the first save, and goes on within the budget."""
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    kinds = [48] * 5 + [odd] + [48] * 20
    room, records = compare(make_lengths, kinds, budget, profile)
    assert [record.mode for record in records[2:]] == [Mode.PLANNED] * 3 + [Mode.DRIFTED] + [Mode.PLANNED] * 20
    assert not room._cache.varies, "nobody looks out for others any more"


def test_what_does_not_fit_is_said_before_it_runs(profile: HardwareProfile) -> None:
    """A step that is too large is refused, in the middle of a run; the run goes on without it."""
    budget = int(0.7 * find_plain_peak(make_lengths, 48, profile))
    model, optimizer, step = make_lengths()
    with elbowroom.fit(model, optimizer, budget, profile=profile, strategy=QUICK, min_offload_bytes=1) as room:
        for index in range(5):
            with room.step():
                step(index, 48)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(Infeasible, match="when aten") as caught, room.step():
            step(5, 512)
        assert caught.value.needed_bytes > budget
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        optimizer.zero_grad()
        for index in range(6, 9):
            with room.step():
                step(index, 48)
        assert room.journal().steps[-1].mode is Mode.PLANNED
        assert room.journal().steps[-1].peak_bytes <= budget


def test_the_first_step_keeps_to_the_budget(profile: HardwareProfile) -> None:
    """Nobody knows it yet, and it is captured."""
    budget = int(0.6 * find_plain_peak(make_lengths, 64, profile))
    _, records = compare(make_lengths, [64] * 5, budget, profile)
    assert records[0].mode is Mode.CAPTURE and 0 < records[0].peak_bytes <= budget


def test_ctrl_c_while_a_step_is_planned_reaches_the_program(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step itself has run, and a later one is planned."""
    search = choice_search.solve_fluid

    def interrupt(*_: Any, **__: Any) -> None:
        monkeypatch.setattr(choice_search, "solve_fluid", search)
        raise KeyboardInterrupt

    budget = int(0.6 * find_plain_peak(make_lengths, 64, profile))
    (_, plain), _ = run(make_lengths, [64] * 8, None)
    monkeypatch.setattr(choice_search, "solve_fluid", interrupt)
    monkeypatch.setattr("elbowroom.planning_times.FEW_STEPS", math.inf)
    torch.manual_seed(11)
    model, optimizer, step = make_lengths()
    with elbowroom.fit(model, optimizer, budget, profile=profile, min_offload_bytes=1) as room:
        interrupted = []
        for index in range(8):
            try:
                with room.step():
                    step(index, 64)
            except KeyboardInterrupt:
                interrupted.append(room.planned)
        assert interrupted == [None]
        assert room.journal().steps[-1].mode is Mode.PLANNED
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain, strict=True))


def test_plain_steps_do_not_hide_larger_ones(profile: HardwareProfile) -> None:
    """Small steps fit as they are; a larger one among them does not."""
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    kinds = [16] * 6 + [64, 16, 64, 16, 64, 16, 64, 16, 64, 64]
    room, _ = compare(make_lengths, kinds, budget, profile, SEARCH)
    assert len(room._cache.entries) == 2


def test_steps_of_all_kinds_run_unwatched_in_ample_room(profile: HardwareProfile) -> None:
    """Nothing is watched or planned for lengths that fit many times over, until one takes half of the room."""
    peak = find_plain_peak(make_lengths, 64, profile)
    kinds = [24, 24, 16, 40, 8, 24, 64, 32]
    room, records = compare(make_lengths, kinds, 8 * peak, profile)
    assert [record.mode for record in records] == [Mode.CAPTURE] * 2 + [Mode.PLAIN] * 6
    assert len(room._cache.entries) == 1 and room.planned is not None
    small = find_plain_peak(make_lengths, 8, profile)
    room, records = compare(make_lengths, [8] * 4 + [64, 8], 3 * small, profile)
    assert [record.mode for record in records[2:]] == [Mode.PLAIN, Mode.PLAIN, Mode.DRIFTED, Mode.PLANNED]
    assert peak > 3 * small and records[4].offloaded_bytes + records[4].recomputed > 0


@pytest.mark.parametrize(("lost_seconds", "plans"), [(0.0, 1), (1e9, 3)])
def test_kinds_are_planned_once_that_pays(
    lost_seconds: float, plans: int, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elbowroom.plan_cache._count_lost_seconds", lambda _: lost_seconds)
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    room, _ = compare(make_lengths, [64, 64, 48, 56] + [48, 48, 48, 56, 56, 56, 64] * 3, budget, profile)
    assert len(room._cache.entries) == plans


@pytest.mark.usefixtures("plans_at_once")
def test_a_kind_that_recurs_is_captured_when_it_comes(profile: HardwareProfile) -> None:
    """Steps of known kinds follow their plans meanwhile, and the trace is that of a captured step."""
    budget = int(0.7 * find_plain_peak(make_lengths, 64, profile))
    kinds = [64, 64, *[64, 64, 64, 64, 40] * 4]
    room, records = compare(make_lengths, kinds, budget, profile)
    known = [Mode.PLANNED] * 4
    rare = [Mode.DRIFTED, Mode.DRIFTED, Mode.CAPTURE, Mode.PLANNED]
    assert [each.mode for each in records[2:]] == [mode for each in rare for mode in (*known, each)]
    alone, _ = compare(make_lengths, [40] * 4, budget, profile)
    found = next(each for each in room._cache.entries if each.planned.trace != room._cache.entries[-1].planned.trace)
    assert alone.planned is not None
    assert found.planned.trace.ops == alone.planned.trace.ops
    assert found.planned.trace.storages == alone.planned.trace.storages
    assert (found.planned.trace.saves, found.planned.trace.needs) == (
        alone.planned.trace.saves, alone.planned.trace.needs
    )  # fmt: skip


@pytest.mark.usefixtures("plans_at_once")
@pytest.mark.parametrize("kinds", [(9, 8, 7), (9, 8, 7, 6)], ids=len)
def test_kinds_that_take_turns_get_their_plans(kinds: tuple[int, ...], profile: HardwareProfile) -> None:
    """All begin alike, so that they are captured by trial."""
    budget = int(0.6 * find_plain_peak(make_exits, 9, profile))
    room, records = compare(make_exits, kinds * 14, budget, profile)
    assert len(room._cache.entries) == len(kinds)
    assert {record.mode for record in records[-len(kinds) :]} == {Mode.PLANNED}


@pytest.mark.usefixtures("plans_at_once")
def test_small_tensors_make_no_kinds(profile: HardwareProfile) -> None:
    kinds = (40, 64)
    budget = int(0.8 * find_plain_peak(make_boxes, 64, profile))
    room, records = compare(make_boxes, kinds * 8, budget, profile, min_offload_bytes=16 << 10)
    assert len(room._cache.entries) == len(kinds)
    assert {record.mode for record in records[-len(kinds) :]} <= {Mode.PLANNED, Mode.PLAIN}


def expect_seconds(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> None:
    """Have strategies expected to take these seconds; 0 if left out."""
    monkeypatch.setattr(PlanningTimes, "expect", lambda _, strategy, unknown=0.0: seconds.get(strategy, 0.0))


@pytest.mark.parametrize(("few_steps", "first"), [(0, QUICK), (math.inf, SEARCH)])
def test_short_steps_are_planned_quickly_at_first(
    few_steps: float, first: str, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A better plan follows once moves have cost as much time as it takes."""
    expect_seconds(monkeypatch, seconds := {BRIEF: 1e6, SEARCH: 1e6})
    monkeypatch.setattr("elbowroom.planning_times.FEW_STEPS", few_steps)
    budget = int(0.8 * find_plain_peak(make_lengths, 64, profile))
    model, optimizer, step = make_lengths()
    with elbowroom.fit(model, optimizer, budget, profile=profile, min_offload_bytes=1) as room:

        def run_steps(count: int) -> str:
            for index in range(count):
                with room.step():
                    step(index, 64)
            assert room.planned is not None
            return room.planned.plan.strategy

        assert run_steps(6) == first
        seconds[BRIEF] = 0.0
        assert run_steps(2) == (BRIEF if first == QUICK else SEARCH)
        seconds[SEARCH] = 0.0
        assert run_steps(2) == SEARCH
        assert (room.journal().peak_bytes or 0) <= budget


def test_further_kinds_are_planned_quickly_at_first(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the quick strategy finds no plan, the next one does."""
    expect_seconds(monkeypatch, seconds := {BRIEF: 1e6, SEARCH: 1e6})
    budget = int(0.7 * find_plain_peak(make_lengths, 48, profile))
    model, optimizer, step = make_lengths()
    with elbowroom.fit(model, optimizer, budget, profile=profile, min_offload_bytes=1) as room:

        def run_steps(kinds: Sequence[int]) -> list[str]:
            for index, kind in enumerate(kinds):
                with room.step():
                    step(index, kind)
            return [each.planned.plan.strategy for each in room._cache.entries]

        quick, first = run_steps([64, 64, 64, 48, 48, 48, 48])
        assert quick == QUICK and first in (QUICK, BRIEF)
        assert run_steps([64, 48]) == [QUICK, first]
        seconds[BRIEF] = 0.0
        assert run_steps([48]) == [BRIEF, first]
        assert room.journal().steps[-1].mode is Mode.PLANNED
        assert (room.journal().peak_bytes or 0) <= budget


@pytest.mark.usefixtures("no_ample_room")
def test_compiled_code_runs_in_steps_that_are_watched_and_not(profile: HardwareProfile) -> None:
    """A compiled model is called with another shape while nothing else is attached."""
    calls = 0

    def count_calls(graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph.forward(*args)

        return call

    model = torch.nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(model, backend=count_calls)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = []
    with elbowroom.fit(model, optimizer, 1 << 30, profile=profile) as room:
        for rows in (8, 8, 8, 16, 8):
            before = calls
            with room.step():
                finish(model, optimizer, compiled(torch.randn(rows, WIDTH)).square().mean())
            counts.append(calls - before)
        modes = [record.mode for record in room.journal().steps]
    assert modes[2:4] == [Mode.PLAIN, Mode.PLANNED]  # watched, and as planned: nothing of it is large enough to move
    assert counts == [1] * 5
    finish(model, optimizer, compiled(torch.randn(8, WIDTH)).square().mean())
    assert calls == sum(counts) + 1
    torch._dynamo.reset()
