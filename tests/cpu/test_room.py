"""A room from its first step to its last: what it refuses, when it plans, when it leaves a step alone."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible, UnknownMember, UsageError
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode, StepRecord
from elbowroom.ir.lease import Lease
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import release_unneeded
from elbowroom.plan_cache import STEPS_THAT_SET_THE_PACE
from elbowroom.planner.plain import EVERYTHING_FITS
from elbowroom.planner.problem import pose
from elbowroom.simulator.planned import PreparedTrace
from tests.leaks import list_threads

WIDTH, LAYERS = 64, 6
Step = Callable[..., torch.Tensor]


def make(*, zero_first: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """A small net whose activations outweigh all else, and a step for any number of rows."""
    torch.manual_seed(0)
    layers = [each for _ in range(LAYERS) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(index: int = 0, rows: int = 1024, *, zeroes: bool = True) -> torch.Tensor:
        if zero_first:
            optimizer.zero_grad()
        generator = torch.Generator().manual_seed(index)
        loss = model(torch.randn(rows, WIDTH, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        if not zero_first and zeroes:
            optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, step


@functools.cache
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


def test_arguments_that_are_something_else(profile: HardwareProfile) -> None:
    model, optimizer, step = make()
    fit: Any = elbowroom.fit
    for arguments, options, words in (
        ((model, None), {}, "torch.optim.Optimizer.*not None"),
        ((model, model), {}, "torch.optim.Optimizer.*not Sequential"),
        ((model, [None]), {}, "Optimizer.*None in it"),
        ((optimizer, model), {}, "torch.nn.Module as the model, or a list of them, not Adam"),
        ((None, optimizer), {}, "torch.nn.Module as the model, or a list of them, not None"),
        ((model, optimizer), {"step": 5}, "step must be a function"),
        ((model, optimizer), {"profile": "v100"}, "HardwareProfile"),
        ((model, optimizer), {"strategy": "autoo"}, "no strategy is called 'autoo'"),
        ((model, optimizer), {"strategy": "autoswap:scores=doa"}, "'scores=doa' is not an option"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            fit(*arguments, "1GiB", **{"profile": profile} | options)
    capture: Any = elbowroom.capture
    for arguments in ((step, optimizer, model), (step, model, None), (None, model, optimizer), (5, model, optimizer)):
        with pytest.raises(UsageError, match=r"expected|step must be a function"):
            capture(*arguments)
    elbowroom.fit(model, optimizer, "1GiB", profile=profile).detach()  # nothing stayed behind


def test_what_cannot_have_a_room(profile: HardwareProfile) -> None:
    model, optimizer, _ = make()
    with pytest.raises(UsageError, match=r"\['cpu', 'meta'\]"):
        elbowroom.fit(nn.Sequential(model, nn.Linear(2, 2, device="meta")), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="meta"):
        elbowroom.fit(nn.Linear(2, 2, device="meta"), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="no parameters"):
        elbowroom.fit(nn.Tanh(), optimizer, "1GiB", profile=profile)
    with pytest.raises(UsageError, match="run one forward pass"):
        elbowroom.fit(nn.LazyLinear(2), optimizer, "1GiB", profile=profile)
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


def run_in_callbacks(room: elbowroom.Room, step: Step, steps: int) -> list[float]:
    losses = []
    for index in range(steps):
        room.begin_step()
        losses.append(step(index).item())
        room.end_step()
    return losses


def test_steps_begin_and_end_in_callbacks(profile: HardwareProfile) -> None:
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    expected = [step(index).item() for index in range(5)]
    model, optimizer, step = make()
    budget = (floor + plain_peak) // 2
    with elbowroom.fit(model, optimizer, budget, profile=profile) as room:
        with pytest.raises(UsageError, match=r"call begin_step\(\) first"):
            room.end_step()
        assert run_in_callbacks(room, step, 5) == expected
        room.begin_step()
        with pytest.raises(UsageError, match="inside"):
            room.begin_step()
        with pytest.raises(UsageError, match="inside a step"):
            room.set_budget("1GiB")
        errors: list[BaseException] = []

        def end() -> None:
            try:
                room.end_step()
            except UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        assert "another thread" in str(errors[0])
        room.end_step(ValueError("of the program"))
        records = room.journal().steps
        assert [record.mode for record in records[2:]] == [Mode.PLANNED] * 3
        assert max(record.peak_bytes or 0 for record in records) <= budget


def test_errors_of_steps_in_callbacks_say_where(profile: HardwareProfile) -> None:
    """A trainer does not tell its callbacks of errors, so nobody ends the step before the error is printed."""
    model, optimizer, step = make()

    class Large(nn.Module):
        gradient_checkpointing = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(1 << 22).numel()

    model[1] = Large()
    room = elbowroom.fit(model, optimizer, 1 << 22, profile=profile)
    room.begin_step()
    with pytest.raises(Infeasible) as caught:
        step()
    text = str(caught.value)
    assert re.search(r"needed at once when \S+ runs in 1 \(.*test_room.py:\d+\)", text), text
    assert text.endswith("turn it off."), text
    assert caught.value.module == "1" and text == str(caught.value)
    room.end_step(caught.value)
    assert text == str(caught.value)
    room.detach()


@pytest.mark.parametrize("ends", ["end_step", "with"])
def test_detach_breaks_a_step_off(ends: str, profile: HardwareProfile) -> None:
    floor, plain_peak = find_range(profile)
    model, optimizer, _ = make()
    room = elbowroom.fit(model, optimizer, (floor + plain_peak) // 2, profile=profile, mode="dynamic")
    with room.step() if ends == "with" else contextlib.nullcontext():
        if ends == "end_step":
            room.begin_step()
        loss = model(torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(0))).square().mean()
        room.detach()
    assert not torch._C._is_key_in_tls("elbowroom.watchers")
    loss.backward()
    gradients = [each.grad for each in model.parameters()]
    model, _, step = make()
    assert loss.item() == step(0, zeroes=False).item()
    assert all(torch.equal(got, each.grad) for got, each in zip(gradients, model.parameters(), strict=True))  # type: ignore[arg-type]
    if ends == "end_step":
        with pytest.raises(UsageError, match="detached"):
            room.end_step()


def test_the_budget_changes_between_steps(profile: HardwareProfile) -> None:
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    expected = [step(index).item() for index in range(8)]
    model, optimizer, step = make()
    half = (floor + plain_peak) // 2
    losses = []
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile) as room:
        for index in range(8):
            if index in (4, 5, 6):
                room.set_budget({4: half, 5: "1GiB", 6: floor + 4096}[index])
            with room.step():
                losses.append(step(index).item())
        records = room.journal().steps
        assert losses == expected and room.budget_bytes == floor + 4096
        plain, planned = Mode.PLAIN, Mode.PLANNED
        assert [record.mode for record in records[2:]] == [plain, plain, planned, plain, planned, planned]
        assert all((record.peak_bytes or 0) <= half for record in (records[4], *records[6:]))
        assert all((record.peak_bytes or 0) <= floor + 4096 for record in records[6:])
        before = room.planned
        for budget, error in (("some", UsageError), (floor // 2, Infeasible), (1, Infeasible)):
            with pytest.raises(error):
                room.set_budget(budget)
            assert room.planned is before and room.budget_bytes == floor + 4096
        assert room._cache.lease == Lease(device_bytes=floor + 4096, host_bytes=None, epoch=3)
    with pytest.raises(UsageError, match="detached"):
        room.set_budget("1GiB")


def test_metrics_are_the_last_step_and_all_so_far(profile: HardwareProfile) -> None:
    floor, plain_peak = find_range(profile)
    budget = (floor + plain_peak) // 2
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, budget, profile=profile) as room:
        assert room.metrics() == {"budget_bytes": budget}
        assert "no step yet" in repr(room)
        for index in range(6):
            with room.step():
                step(index)
            found, steps = room.metrics(), room.journal().steps
            last, peaks = steps[-1], [record.peak_bytes for record in steps if record.peak_bytes is not None]
            assert found["step"] == index and found["mode"] == last.mode
            assert found["step_seconds"] == last.seconds and found["recomputed_segments"] == last.recomputed
            assert found.get("peak_bytes") == last.peak_bytes and found["max_peak_bytes"] == max(peaks)
            for name in ("stall_seconds", "offloaded_bytes", "reloaded_bytes"):
                assert found[name] == getattr(last, name)
                assert found[f"total_{name}"] == pytest.approx(sum(getattr(record, name) for record in steps))
            assert sum(int(found[f"{mode}_steps"]) for mode in Mode) == index + 1
            assert all(isinstance(value, str if name == "mode" else int | float) for name, value in found.items())
            assert (room.planned is None) == ("forecast_peak_bytes" not in found)
        assert room.planned is not None
        assert found["forecast_peak_bytes"] == room.planned.forecast.peak_bytes <= budget
        assert found["forecast_step_seconds"] == room.planned.forecast.step_seconds
        assert found["planned_steps"] and found["total_offloaded_bytes"]
        documented = set(re.findall(r"\w+", room.metrics.__doc__ or ""))
        assert found.keys() <= documented


def test_a_room_and_its_plan_print_as_a_line_and_as_a_table(profile: HardwareProfile) -> None:
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile) as room:
        for index in range(4):
            with room.step():
                step(index)
        took = r"step 3 \(plain\) took [\d.]+ \w+, max peak [\d.]+ MiB"
        assert re.fullmatch(rf"<Room: 'Sequential' on cpu within 1\.00 GiB; {took}>", repr(room))
        assert room.planned is not None and len(repr(room.planned)) < 500
        assert '<th scope="row">step</th><td>3</td>' in room._repr_html_()
        assert '<th scope="row">strategy</th>' in room.planned._repr_html_()
        for page in (room._repr_html_(), room.planned._repr_html_()):
            assert page.count("<tr>") == page.count("</tr>") > 5 and len(page) < 2000
    assert "detached" in repr(room)
    assert repr(elbowroom.room.Room.__new__(elbowroom.room.Room)) == "<Room: not made>"


def test_infeasible_comes_before_anything_has_run(profile: HardwareProfile) -> None:
    floor, _ = find_range(profile)
    model, optimizer, step = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizer, floor // 8, profile=profile, step=step)
    assert (caught.value.needed_bytes, caught.value.budget_bytes) == (floor, floor // 8)
    assert "If ops run in slices, at least " in str(caught.value)
    assert not optimizer.state and all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    with elbowroom.fit(model, optimizer, floor, profile=profile, step=step) as room:
        for index in range(6):
            with room.step():
                step(index)
        records = room.journal().steps
        assert {record.mode for record in records} == {Mode.PLANNED}  # from the first step on
        assert 0 < max(record.peak_bytes or 0 for record in records) <= floor


def test_infeasible_comes_before_the_op_that_does_not_fit(profile: HardwareProfile) -> None:
    floor, _ = find_range(profile)
    model, optimizer, step = make()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with elbowroom.fit(model, optimizer, floor // 8, profile=profile) as room:
        for index in range(2):
            with pytest.raises(Infeasible, match="when aten") as caught, room.step():
                step(index)
            assert floor // 8 < caught.value.needed_bytes < 2 * floor
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True)), "nothing was lost"
    with elbowroom.fit(model, optimizer, 2 * floor, profile=profile) as room:
        for index in range(4):
            with room.step():
                step(index)


def test_nothing_when_nothing_is_needed(profile: HardwareProfile) -> None:
    _, plain_peak = find_range(profile)
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, plain_peak + (1 << 20), profile=profile) as room:
        for index in range(8):
            with room.step():
                attached = (
                    torch._C._autograd._top_saved_tensors_default_hooks(False),
                    torch._C._is_key_in_tls("elbowroom.watchers"),
                    list_threads(),
                )
                step(index)
            if room.journal().steps[-1].mode is Mode.PLAIN:
                break
        assert room.planned is not None and room.planned.plan.strategy == EVERYTHING_FITS
        for index in range(3):
            with room.step():
                assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
                assert not torch._C._is_key_in_tls("elbowroom.watchers")
                step(index)
        records = room.journal().steps[-3:]
        assert {record.mode for record in records} == {Mode.PLAIN}
        assert sum(record.offloaded_bytes + record.recomputed + record.saves for record in records) == 0
    del attached


def test_steps_that_grow_are_planned_when_they_no_longer_fit(profile: HardwareProfile) -> None:
    _, plain_peak = find_range(profile)
    model, optimizer, step = make()
    plain, _, plain_step = make()
    rows = [1024] * 5 + [2048] * 7
    expected = [plain_step(*each) for each in enumerate(rows)]
    with elbowroom.fit(model, optimizer, plain_peak + 1000, profile=profile) as room:
        for index, count in enumerate(rows):
            with room.step():
                loss = step(index, count)
            assert torch.equal(loss, expected[index])
            if index == 4:
                assert room.journal().steps[-1].mode is Mode.PLAIN
        records = room.journal().steps
        assert records[-1].mode is Mode.PLANNED
        assert max(record.peak_bytes or 0 for record in records) <= room.budget_bytes
        assert records[5].mode is Mode.DRIFTED, "what the model was called with told of it"
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


class BackwardOnly(torch.autograd.Function):
    """Calls a model in its backward pass, and nowhere else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: nn.Module) -> torch.Tensor:  # type: ignore[override]
        ctx.model = model
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:  # type: ignore[override]
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.model(x), gradient)
        return x.grad, None


GROWS_AT, LARGER = 3, 700


def call_in_backward(model: nn.Module, x: torch.Tensor, is_larger: bool) -> torch.Tensor:
    return BackwardOnly.apply(x.exp(), model).square().mean()  # type: ignore[no-any-return, no-untyped-call]


def call_in_gradient_hook(model: nn.Module, x: torch.Tensor, is_larger: bool) -> torch.Tensor:
    y: torch.Tensor = model(x[:256])
    y.register_hook(lambda gradient: gradient + 1e-3 * model(x.detach()).sum().detach())
    return y.square().mean()


def call_in_thread(model: nn.Module, x: torch.Tensor, is_larger: bool) -> torch.Tensor:
    found = [model(x[:256])]
    if is_larger:
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
    return sum(each.square().mean() for each in found)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (call_in_backward, "inside a backward pass"),
        (call_in_gradient_hook, "inside a backward pass"),
        (call_in_thread, "in another thread"),
    ],
)
@pytest.mark.usefixtures("no_ample_room")
def test_a_larger_call_where_nothing_can_begin_to_watch(
    call: Callable[..., torch.Tensor], why: str, profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a crash nor a step that passes for usual: the next one is watched from its beginning."""

    def train(room_of: Callable[..., Any]) -> list[float]:
        model, optimizer, _ = make()
        losses = []
        with room_of(model, optimizer) as room:
            for index in range(GROWS_AT + 3):
                is_larger = index >= GROWS_AT
                x = torch.randn(LARGER if is_larger else 256, WIDTH, generator=torch.Generator().manual_seed(index))
                with room.step() if room is not None else contextlib.nullcontext():
                    loss = call(model, x.requires_grad_(), is_larger)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
                assert not torch._C._is_key_in_tls("elbowroom.watchers")
            if room is not None:
                records.extend(room.journal().steps)
        return losses

    records: list[StepRecord] = []
    plain = train(lambda model, optimizer: contextlib.nullcontext())
    assert train(lambda *job: elbowroom.fit(*job, "1GiB", profile=profile)) == plain
    assert [record.mode for record in records[GROWS_AT - 1 : GROWS_AT + 1]] == [Mode.PLAIN, Mode.DRIFTED]
    assert why in records[GROWS_AT].note and why in caplog.text
    assert records[GROWS_AT].saves == 0 and all(record.mode is not Mode.PLAIN for record in records[GROWS_AT:])
    assert caplog.text.count("may take more than those before it") == 1


@pytest.mark.parametrize("zero_first", [False, True])
def test_the_peak_of_every_step_is_known(zero_first: bool, profile: HardwareProfile) -> None:
    """Also where a step frees what was made in the one before."""
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make(zero_first=zero_first)
    budget = (floor + plain_peak) // 2
    with elbowroom.fit(model, optimizer, budget, profile=profile) as room:
        for index in range(9):
            with room.step():
                step(index)
        assert room.planned is not None
        forecast = room.planned.forecast.peak_bytes
        planned = [record for record in room.journal().steps if record.mode is Mode.PLANNED]
        assert len(planned) >= 5
        for record in planned:
            assert record.peak_bytes is not None and 0 < record.peak_bytes <= budget
            assert record.peak_bytes == pytest.approx(forecast, rel=0.01, abs=17 << 10)


def test_the_forecast_keeps_the_pace(profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of later steps are those that planned steps took, but for the first, which is cold."""
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    with elbowroom.fit(model, optimizer, (floor + plain_peak) // 2, profile=profile) as room:
        index = 0
        while room.planned is None:
            with room.step():
                step(index)
        first = room.planned
        seconds = iter([100.0, 3.0, 5.0, 4.0, 4.0, 4.0, 70.0, 80.0])
        for planned_steps in range(1, 9):
            record = room._metering.record

            def told(mode: Any, _: float, *rest: Any, record: Any = record) -> Any:
                return record(mode, next(seconds), *rest)

            with monkeypatch.context() as patch:
                patch.setattr(room._metering, "record", told)
                with room.step():
                    step(planned_steps)
            expected = {1: first.forecast.step_seconds, 2: 3.0, 3: 4.0}.get(planned_steps, 4.0)
            assert room.planned.forecast.step_seconds == pytest.approx(expected, rel=0.05, abs=0.02), planned_steps
        assert STEPS_THAT_SET_THE_PACE == 5
        assert room.planned.plan == first.plan and room.planned.forecast.peak_bytes == first.forecast.peak_bytes


def test_a_step_in_which_everything_fits_is_not_simulated(
    profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator takes as long as a small step. Its forecast, made when it is asked for, has the measured time."""
    model, optimizer, step = make()
    runs: list[Plan] = []
    run = PreparedTrace.run

    def counted(prepared: PreparedTrace, plan: Plan, **options: Any) -> Forecast:
        runs.append(plan)
        return run(prepared, plan, **options)

    with elbowroom.fit(model, optimizer, "8GiB", profile=profile) as room:
        for index in range(3):
            with room.step():
                step(index)
        assert room.planned is not None and room.planned.is_plain
        first = room.planned.forecast
        monkeypatch.setattr(PreparedTrace, "run", counted)
        for index in range(12):
            with room.step():
                step(index)
            if index == 6:  # as if steps took another time from here on: the pace is found anew
                fails = iter([True])
                monkeypatch.setattr(
                    room._cache.entries[0].check, "fails", lambda *_, fails=fails, **__: next(fails, False)
                )
        assert room.journal().steps[-1].mode is Mode.PLAIN and not runs
        planned = room.planned
        assert planned.forecast.peak_bytes == planned.peak_bytes == first.peak_bytes
        taken = planned.forecast.step_seconds - planned.forecast.stall_seconds
        assert taken == pytest.approx(planned.busy_seconds) and taken != pytest.approx(first.step_seconds, rel=1e-9)
        assert len(runs) == 1


@pytest.mark.parametrize("budget", ["8GiB", None])
def test_a_model_is_exported_in_a_step(budget: str | None, profile: HardwareProfile) -> None:
    """With shapes that vary: its inputs are symbols then, not those of a step."""
    floor, plain_peak = find_range(profile)
    model, optimizer, step = make()
    inputs = torch.randn(4, WIDTH)
    with elbowroom.fit(model, optimizer, budget or (floor + plain_peak) // 2, profile=profile) as room:
        for index in range(6):
            with room.step():
                if index > 3:
                    exported = torch.export.export(model, (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},))
                step(index)
        expected = Mode.PLAIN if budget else Mode.PLANNED
        assert room.journal().steps[3].mode is expected and room.journal().steps[-1].mode in (expected, Mode.DRIFTED)
    torch.testing.assert_close(exported.module()(inputs[:2]), model(inputs[:2]))


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


class Adversaries(nn.Module):
    """A generator and its critic, whose step detaches what the generator made: autograd never asks for its saves."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = (
            nn.Sequential(*(each for _ in range(4) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU()))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.generator(x)
        return self.critic(x).square().mean() + self.critic(fake.detach()).square().mean() + 0 * fake.sum().detach()


@pytest.mark.usefixtures("whole_ops")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_step_that_only_a_policy_can_fit_runs_without_a_plan(
    is_ahead: bool, profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    def run(budget: int, **options: Any) -> tuple[list[torch.Tensor], elbowroom.Room]:
        torch.manual_seed(0)
        model, losses = Adversaries(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(512, WIDTH)

        def step() -> None:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

        if is_ahead:
            options["step"] = step
        with elbowroom.fit(model, optimizer, budget, profile=profile, **options) as room:
            del losses[:]
            for _ in range(6):
                with room.step():
                    step()
            return losses, room

    expected, room = run(1 << 30)
    assert room.planned is not None
    trace = room.planned.trace
    floor, without = (
        pose(each, room.planned.costs, 1).floor.peak_bytes for each in (trace, release_unneeded(trace))
    )  # fmt: skip
    assert without < 0.9 * floor, "this case shows nothing"
    budget = (floor + without) // 2
    found, room = run(budget)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    records = room.journal().steps
    assert (room.journal().peak_bytes or 0) <= budget
    assert Mode.DYNAMIC in {record.mode for record in records}
    assert "run without a plan" in caplog.text
    with pytest.raises(Infeasible):
        run(without // 6)


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
def test_the_smallest_budget_is_enough_and_no_plan_fits_less(kind: str, profile: HardwareProfile) -> None:
    smallest = elbowroom.smallest_budget(*make_job(kind), profile=profile)
    for is_ahead in (True, False):
        model, optimizers, step = make_job(kind)
        ahead = step if is_ahead else None
        with elbowroom.fit(model, optimizers, smallest, step=ahead, profile=profile) as room:
            for _ in range(3):
                with room.step():
                    step()
            assert 0 < max(record.peak_bytes for record in room.journal().steps) <= smallest
    model, optimizers, step = make_job(kind)
    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizers, smallest - 1, step=step, profile=profile, strategy="auto:effort=0.02")
    assert caught.value.is_whole_step and caught.value.needed_bytes == smallest
    assert caught.value.is_estimated and "is estimated" in str(caught.value)
    with pytest.raises(UsageError, match="makes no plan"):
        elbowroom.smallest_budget(*make_job(kind), profile=profile, mode="dynamic")


def test_an_op_that_does_not_fit_is_no_whole_step(profile: HardwareProfile) -> None:
    model, optimizers, step = make_job("mlp")
    smallest = elbowroom.smallest_budget(model, optimizers, step, profile=profile)
    with elbowroom.fit(model, optimizers, smallest // 2, profile=profile, manages="activations") as room:
        said = r"at least .*smallest_budget\(model, optimizer, step\)"
        with pytest.raises(Infeasible, match=said) as caught, room.step():
            step()
        assert not caught.value.is_whole_step and caught.value.needed_bytes < smallest
        assert (
            dict(caught.value.in_the_way)["parameters, gradients and optimizer state that it uses or that do not leave"]
            > 0
        )


def test_advice_names_what_helps(profile: HardwareProfile) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model.gradient_checkpointing = True  # type: ignore[assignment]

    def step() -> None:
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with pytest.raises(Infeasible) as caught:
        elbowroom.fit(model, optimizer, 100_000, step=step, profile=profile, manages="activations")
    for said in ("fused=True or foreach=False", "Gradient checkpointing is on", "Parameters, gradients and optimizer"):
        assert said in str(caught.value)


def test_a_function_that_is_no_step_is_not_planned_ahead(
    profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, _ = make()
    with elbowroom.fit(model, optimizer, "1GiB", profile=profile, step=lambda: None) as room:
        assert room.planned is None
    assert "never calls backward" in caplog.text
