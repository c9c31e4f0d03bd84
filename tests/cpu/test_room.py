"""A room from its first step to its last: what it refuses, when it plans, when it leaves a step alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import elbowroom
from elbowroom.errors import Infeasible, UnknownMember, UsageError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.plain import EVERYTHING_FITS
from elbowroom.repertoire import STEPS_THAT_SET_THE_PACE

WIDTH, LAYERS = 64, 6
Step = Callable[..., torch.Tensor]


def make(*, zero_first: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A small net whose activations outweigh all else, and a step for any number of rows."""
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(index: int = 0, rows: int = 1024) -> torch.Tensor:
        if zero_first:
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(index)
        loss = model(torch.randn(rows, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


def find_range(profile: HardwareProfile) -> tuple[int, int]:
    """The smallest budget that works, and the plain peak."""
    model, optimizer, step = make()
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizer, 1, profile=profile, step=step)
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile, step=step) as room:
        assert room.planned is not None
        return caught.value.needed_bytes, room.planned.forecast.peak_bytes


@pytest.mark.parametrize(
    "budget", ["", "eight", "8 XiB", "-1GiB", "0", 0, -5, float("nan"), float("inf"), True, None, "0%", "-3%", [8]]
)
def test_malformed_budgets(budget: Any, profile: HardwareProfile) -> None:
    model, optimizer, _ = make()
    with pytest.raises(UsageError, match="memory_budget"):
        elbowroom.fit(model, optimizer, budget, profile=profile)
    elbowroom.fit(model, optimizer, "1GiB", profile=profile).detach()  # nothing stayed behind


def test_what_cannot_have_a_room(profile: HardwareProfile) -> None:
    model, optimizer, _ = make()
    with pytest.raises(UsageError, match=r"\['cpu', 'meta'\]"):
        elbowroom.fit(nn.Sequential(model, nn.Linear(2, 2, device="meta")), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="meta"):
        elbowroom.fit(nn.Linear(2, 2, device="meta"), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="no parameters"):
        elbowroom.fit(nn.Tanh(), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="Optimizer"):
        elbowroom.fit(model, [optimizer, "adam"], "1GiB", profile=profile)  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"unknown options \['budget'\]"):
        elbowroom.fit(model, optimizer, "1GiB", profile=profile, budget=3)
    with pytest.raises(UnknownMember, match="auto"):
        elbowroom.fit(model, optimizer, 100_000, profile=profile, strategy="magic", step=make()[2])


def test_misuse(profile: HardwareProfile) -> None:
    model, optimizer, step = make()
    room = elbowroom.fit(model, optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="already has a room"):
        elbowroom.fit(model, optimizer, "1GiB", profile=profile)
    with room.step():
        with pytest.raises(UsageError, match="inside"), room.step():
            pass
        step()
    room.detach()
    room.detach()
    with pytest.raises(UsageError, match="detached"), room.step():
        pass


def test_infeasible_comes_before_anything_has_run(profile: HardwareProfile) -> None:
    floor, _ = find_range(profile)
    model, optimizer, step = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizer, floor - 1, profile=profile, step=step)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (floor, floor - 1)
    assert not optimizer.state and all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    with elbowroom.fit(model, optimizer, floor, profile=profile, step=step, meter_every=1) as room:
        for index in range(6):
            with room.step():
                step(index)
        records = room.journal().steps
        assert {record.mode for record in records} == {Mode.PLANNED}  # from the first step on
        assert 0 < max(record.peak_bytes for record in records) <= floor


def test_infeasible_comes_before_the_op_that_does_not_fit(profile: HardwareProfile) -> None:
    floor, _ = find_range(profile)
    model, optimizer, step = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with elbowroom.fit(model, optimizer, floor // 2, profile=profile) as room:
        for index in range(2):
            with pytest.raises(Infeasible, match="when aten") as caught, room.step():
                step(index)
            assert floor // 2 < caught.value.needed_bytes < 2 * floor
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)), "nothing was lost"
    with elbowroom.fit(model, optimizer, 2 * floor, profile=profile) as room:
        for index in range(4):
            with room.step():
                step(index)


def test_nothing_when_nothing_is_needed(profile: HardwareProfile) -> None:
    _, plain_peak = find_range(profile)
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, plain_peak + (1 << 20), profile=profile, meter_every=0) as room:
        for index in range(8):
            with room.step():
                attached = (
                    torch._C._autograd._top_saved_tensors_default_hooks(False),
                    _get_current_dispatch_mode_stack(),
                    [each for each in threading.enumerate() if each.name.startswith("elbowroom")],
                )
                step(index)
            if room.journal().steps[-1].mode is Mode.PLAIN:
                break
        assert room.planned is not None and room.planned.plan.strategy == EVERYTHING_FITS
        for index in range(3):
            with room.step():
                assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
                assert _get_current_dispatch_mode_stack() == []
                step(index)
        records = room.journal().steps[-3:]
        assert {record.mode for record in records} == {Mode.PLAIN}
        assert sum(record.offloaded_bytes + record.recomputed + record.saves for record in records) == 0
    del attached


def test_steps_that_grow_are_planned_when_they_no_longer_fit(profile: HardwareProfile) -> None:
    _, plain_peak = find_range(profile)
    model, optimizer, step = make()
    plain, _, plain_step = make()
    with elbowroom.fit(model, optimizer, plain_peak + 1000, profile=profile, meter_every=1) as room:
        for index in range(12):
            rows = 1024 if index < 5 else 2048
            with room.step():
                loss = step(index, rows)
            assert torch.equal(loss, plain_step(index, rows))
            if index == 4:
                assert room.journal().steps[-1].mode is Mode.PLAIN
        records = room.journal().steps
        assert records[-1].mode is Mode.PLANNED
        assert max(record.peak_bytes for record in records) <= room.budget_bytes
        assert records[5].mode is Mode.DRIFTED, "what the model was called with told of it"
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("every", [1, 4, 100])
@pytest.mark.parametrize("zero_first", [False, True])
def test_what_is_metered_is_right(every: int, zero_first: bool, profile: HardwareProfile) -> None:
    """Also where a step frees what was made in one that nobody metered."""
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make(zero_first=zero_first)
    budget = (floor + plain_peak) // 2
    with elbowroom.fit(model, optimizer, budget, profile=profile, meter_every=every) as room:
        for index in range(18):
            with room.step():
                step(index)
        assert room.planned is not None
        forecast = room.planned.forecast.peak_bytes
        planned = [record for record in room.journal().steps if record.mode is Mode.PLANNED]
        metered = [record for record in planned if record.peak_bytes]
        assert len(planned) >= 14 and len(metered) >= {1: 14, 4: 3, 100: 2}[every]
        assert len(metered) <= {1: 18, 4: 11, 100: 2}[every]
        for record in metered:
            assert record.peak_bytes <= budget
            assert record.peak_bytes == pytest.approx(forecast, rel=0.01, abs=17 << 10)


def test_the_forecast_keeps_the_pace(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of later steps are those that planned steps took, but for the first, which is cold."""
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, (floor + plain_peak) // 2, profile=profile, meter_every=0) as room:
        index = 0
        while room.planned is None:
            with room.step():
                step(index)
        first = room.planned
        seconds = iter([100.0, 3.0, 5.0, 4.0, 4.0, 4.0, 70.0, 80.0])
        for planned_steps in range(1, 9):
            record = room._record

            def told(mode: Any, _: float, *rest: Any, record: Any = record) -> Any:
                return record(mode, next(seconds), *rest)

            with monkeypatch.context() as patch:
                patch.setattr(room, "_record", told)
                with room.step():
                    step(planned_steps)
            expected = {1: first.forecast.step_seconds, 2: 3.0, 3: 4.0}.get(planned_steps, 4.0)
            assert room.planned.forecast.step_seconds == pytest.approx(expected, rel=0.05, abs=0.02), planned_steps
        assert STEPS_THAT_SET_THE_PACE == 5
        assert room.planned.plan == first.plan and room.planned.forecast.peak_bytes == first.forecast.peak_bytes


def test_a_report_at_every_moment(profile: HardwareProfile) -> None:
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    room = elbowroom.fit(model, optimizer, (floor + plain_peak) // 2, profile=profile)
    assert "none run" in room.report()
    for index in range(6):
        with room.step():
            step(index)
        assert "Within budget" in room.report()
    room.detach()
    text = room.report()
    assert "planned" in text and "forecast" in text and "away" in text


def make_job(kind: str) -> tuple[nn.Module, list[torch.optim.Optimizer], Callable[[], None]]:
    """A small model of some kind, its optimizers, and one step with two backward passes."""
    torch.manual_seed(0)
    if kind == "mlp":
        model: nn.Module = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(64, 64), nn.GELU())))
        batch = torch.randn(512, 64)
    elif kind == "conv":
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        batch = torch.randn(8, 3, 24, 24)
    else:
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        model, batch = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 32, 32)
    parameters = list(model.parameters())
    halves = (parameters[::2], parameters[1::2])
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], lr=0.1)]

    def step() -> None:
        for part in batch.chunk(2):
            model(part).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    return model, optimizers, step


@pytest.mark.parametrize("kind", ["mlp", "conv", "transformer"])
def test_the_smallest_budget_is_enough_and_less_is_not(kind: str, profile: HardwareProfile) -> None:
    smallest = elbowroom.smallest_budget(*make_job(kind), profile=profile)
    for is_ahead in (True, False):
        model, optimizers, step = make_job(kind)
        ahead = step if is_ahead else None
        with elbowroom.fit(model, optimizers, smallest, step=ahead, profile=profile, meter_every=1) as room:
            for _ in range(3):
                with room.step():
                    step()
            assert 0 < max(record.peak_bytes for record in room.journal().steps) <= smallest
    model, optimizers, step = make_job(kind)
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizers, smallest - 1, step=step, profile=profile)
    assert caught.value.is_whole_step and caught.value.needed_bytes == smallest
    assert caught.value.is_estimated and "is estimated" in str(caught.value)
    with pytest.raises(UsageError, match="makes no plan"):
        elbowroom.smallest_budget(*make_job(kind), profile=profile, mode="dynamic")


def test_an_op_that_does_not_fit_is_no_whole_step(profile: HardwareProfile) -> None:
    model, optimizers, step = make_job("mlp")
    smallest = elbowroom.smallest_budget(model, optimizers, step, profile=profile)
    with elbowroom.fit(model, optimizers, smallest // 2, profile=profile) as room:
        said = r"at least .*smallest_budget\(model, optimizer, step\)"
        with pytest.raises(Infeasible, match=said) as caught, room.step():
            step()
        assert not caught.value.is_whole_step and caught.value.needed_bytes < smallest
        assert dict(caught.value.in_the_way)["parameters, gradients and optimizer state"] > 0


def test_advice_names_what_helps(profile: HardwareProfile) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model.gradient_checkpointing = True  # type: ignore[assignment]

    def step() -> None:
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizer, 100_000, step=step, profile=profile)
    for said in ("fused=True or foreach=False", "Gradient checkpointing is on", "Parameters, gradients and optimizer"):
        assert said in str(caught.value)
