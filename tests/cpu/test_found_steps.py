"""Loops that do not say where their steps begin and end: the same bits, and the budget held from the first step on."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import PostLocalSGDOptimizer

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.step_boundaries import StepBoundaries
from tests.state_jobs import BUDGET, MIN_BYTES, OutsideMeter, StateJob, adamw, list_tensors, make_batch, make_model

STEPS = 6
PLENTY = 1 << 30

Loop = Callable[[StateJob], Iterator[None]]
"""A training loop, which yields after each step."""


def update(job: StateJob) -> None:
    for optimizer in job.optimizers:
        optimizer.step()
    for optimizer in job.optimizers:
        optimizer.zero_grad()


def plainest(job: StateJob) -> Iterator[None]:
    for index in range(STEPS):
        job.model(make_batch(index)).square().mean().backward()
        update(job)
        yield


def accumulating(job: StateJob) -> Iterator[None]:
    for index in range(STEPS):
        for part in range(3):
            job.model(make_batch(3 * index + part)).square().mean().backward()
        update(job)
        yield


def evaluating(job: StateJob) -> Iterator[None]:
    for index in range(STEPS):
        job.model(make_batch(index)).square().mean().backward()
        update(job)
        yield
        job.model.eval()
        with torch.no_grad():
            job.model(make_batch(index, rows=3))
        job.model.train()


def calling_parts(job: StateJob) -> Iterator[None]:
    for index in range(STEPS):
        x = make_batch(index)
        for part in job.model.children():
            x = part(x)
        x.square().mean().backward()
        update(job)
        yield


def one_by_one(job: StateJob) -> Iterator[None]:
    """As with a GAN, each optimizer steps after a backward pass of its own."""
    for index in range(STEPS):
        for optimizer in job.optimizers:
            job.model(make_batch(index)).square().mean().backward()
            optimizer.step()
            for each in job.optimizers:
                each.zero_grad()
        yield


def with_closures(job: StateJob) -> Iterator[None]:
    for index in range(STEPS):
        for optimizer in job.optimizers:

            def close(optimizer: torch.optim.Optimizer = optimizer, index: int = index) -> float:
                optimizer.zero_grad()
                loss = job.model(make_batch(index)).square().mean()
                loss.backward()
                return loss.item()

            optimizer.step(close)
        yield


def compiled(job: StateJob) -> Iterator[None]:
    model = torch.compile(job.model, backend="aot_eager")
    for index in range(STEPS):
        model(make_batch(index)).square().mean().backward()
        update(job)
        yield


def make_state_job(optimizers: int = 1) -> StateJob:
    model = make_model()
    parts = list(model.parameters())
    each = -(-len(parts) // optimizers)
    made = [adamw(parts[begin : begin + each]) for begin in range(0, len(parts), each)]
    return StateJob(model, made, lambda _: None)


def fit(job: StateJob, profile: HardwareProfile, budget_bytes: int = BUDGET, **options: Any) -> Room:
    options = {"min_offload_bytes": MIN_BYTES, "profile": profile} | options
    return elbowroom.fit(job.model, job.optimizers, budget_bytes, **options)


def assert_nothing_attached(job: StateJob) -> None:
    assert not any("_compiled_call_impl" in vars(each) for each in job.model.modules())
    for optimizer in job.optimizers:
        assert not optimizer._optimizer_step_pre_hooks  # type: ignore[attr-defined]
        assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
@pytest.mark.parametrize(
    ("loop", "optimizers"),
    [
        *((plainest, 1), (plainest, 2), (accumulating, 1), (evaluating, 1), (calling_parts, 1), (one_by_one, 2)),
        *((with_closures, 1), (compiled, 1)),
    ],
)
def test_an_unchanged_loop_has_its_bits_and_its_budget(
    loop: Loop, optimizers: int, mode: str, profile: HardwareProfile
) -> None:
    plain = make_state_job(optimizers)
    for _ in loop(plain):
        pass
    torch._dynamo.reset()
    meter, job = OutsideMeter(), make_state_job(optimizers)
    with fit(job, profile, mode=mode) as room:
        for index, _ in enumerate(loop(job)):
            ended = len(room.journal().steps)
            assert ended == index + 1 if loop is not compiled else ended in (index, index + 1)
            if index == 0:
                begin = meter.count_seconds()
        meter.stop()
        assert (room.journal().peak_bytes or 0) <= BUDGET
        assert max(record.offloaded_bytes for record in room.journal().steps) > 0
    assert meter.find_peak(begin) <= BUDGET
    assert_nothing_attached(job)
    expected, found = list_tensors(plain), list_tensors(job)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_an_optimizer_that_takes_no_hooks_is_replaced_by_the_one_in_it(profile: HardwareProfile) -> None:
    class Averager:
        def average_parameters(self, params: object) -> None:
            pass

    model = torch.nn.Linear(4, 4)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), Averager())
    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile) as room:
        for _ in range(3):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(room.journal().steps) == 3


def test_a_step_of_the_program_ends_the_search(profile: HardwareProfile) -> None:
    job = make_state_job()
    with fit(job, profile, PLENTY) as room:
        job.model(make_batch(0)).square().mean().backward()  # begins a step, which `with` ends
        with room.step():
            assert not job.optimizers[0]._optimizer_step_post_hooks  # type: ignore[attr-defined]
            update(job)
        assert_nothing_attached(job)
        assert len(room.journal().steps) == 2
        job.model(make_batch(1)).square().mean().backward()
        update(job)
        assert len(room.journal().steps) == 2


def test_what_is_no_training_begins_no_step(profile: HardwareProfile) -> None:
    job = make_state_job()

    def step() -> None:
        job.model(make_batch(0)).square().mean().backward()
        update(job)

    with fit(job, profile, PLENTY) as room:
        with mock.patch.object(StepBoundaries, "begin_step") as begin, torch.no_grad():
            job.model(make_batch(0))
            job.model.eval()
            with torch.enable_grad():
                job.model(make_batch(0))
            job.model.train()
            get_optimizer_state_dict(job.model, job.optimizers)  # steps the optimizer, to have it make its state
            with torch.enable_grad():
                elbowroom.smallest_budget(job.model, job.optimizers, step, profile=profile)
        assert not begin.called
        for index, _ in enumerate(plainest(job)):
            assert len(room.journal().steps) == index + 1


def test_the_budget_may_be_raised_after_a_refusal(profile: HardwareProfile) -> None:
    def train(job: StateJob, rows: int) -> None:
        job.model(make_batch(0, rows)).square().mean().backward()
        update(job)

    plain, job = make_state_job(), make_state_job()
    with fit(job, profile) as room:
        train(job, 8)
        with pytest.raises(Infeasible):
            train(job, 1 << 15)  # whose backward passes have no slices of this size
        room.set_budget(PLENTY)
        for _ in range(3):
            train(job, 1 << 15)
        assert [record.mode for record in room.journal().steps][1:]
    train(plain, 8)
    for _ in range(3):
        train(plain, 1 << 15)
    expected, found = list_tensors(plain), list_tensors(job)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


class DoublesInCall(nn.Linear):
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(2 * x)  # type: ignore[no-any-return]


def test_a_call_of_the_class_itself_runs_once(profile: HardwareProfile) -> None:
    def train(within: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = DoublesInCall(64, 64)
        job = StateJob(model, [adamw(model.parameters())], lambda _: None)
        room = fit(job, profile, PLENTY) if within else None
        for _ in plainest(job):
            pass
        if room is not None:
            room.detach()
        return model.weight.detach()

    assert torch.equal(train(within=True), train(within=False))


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
def test_a_model_that_is_called_within_a_transform(mode: str, profile: HardwareProfile) -> None:
    """Its tensors are wrapped there, so no step can begin."""

    def train(within: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        room = elbowroom.fit(model, optimizer, PLENTY, profile=profile, mode=mode) if within else None

        def count_loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (x,)).square().mean()

        for index in range(4):
            parameters = {name: each.detach() for name, each in model.named_parameters()}
            for_each = torch.func.vmap(torch.func.grad(count_loss), in_dims=(None, 0))
            found = for_each(parameters, make_batch(index)[:, :8])
            for name, each in model.named_parameters():
                each.grad = found[name].mean(0)
            optimizer.step()
        if room is not None:
            assert len(room.journal().steps) == 2
            room.detach()
        return [each.detach() for each in model.parameters()]

    assert all(map(torch.equal, train(within=True), train(within=False)))


def test_evaluation_in_another_thread_ends_no_step(profile: HardwareProfile) -> None:
    """Where optimizers step in the backward pass, a step ends at the next call of the model in its own thread."""
    model = make_model(2)
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def update_one(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update_one)
    errors: list[BaseException] = []

    def evaluate() -> None:
        try:
            with torch.no_grad():
                model(make_batch(0))
        except BaseException as error:  # the thread would swallow it
            errors.append(error)

    with elbowroom.fit(model, optimizers.values(), PLENTY, profile=profile) as room:
        for index in range(3):
            model(make_batch(index)).square().mean().backward()
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
        assert len(room.journal().steps) == 2
    assert not errors


def test_parts_that_are_trained_in_turn(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    job = make_state_job()
    first, second, *_ = job.model.children()
    with caplog.at_level(logging.WARNING, "elbowroom"), fit(job, profile, PLENTY) as room:
        for index in range(6):
            part = (first, second)[index % 2]
            part(make_batch(index)).square().mean().backward()
            update(job)
        assert len(room.journal().steps) == 5, "the second part is noticed when it has been updated"
    assert not caplog.text


def test_steps_that_are_found_late_are_told(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    job = make_state_job()
    job.model.eval()
    with caplog.at_level(logging.WARNING, "elbowroom"), fit(job, profile, PLENTY) as room:
        for _ in plainest(job):
            pass
        assert len(room.journal().steps) == STEPS - 2
    assert caplog.text.count("the calls of the model do not tell where training steps begin") == 1


def test_updates_for_ranks_that_have_batches_left(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    """`Join` has a `ZeroRedundancyOptimizer` step so, without a call of the model."""
    job = make_state_job()
    (optimizer,) = job.optimizers
    with elbowroom.fit(job.model, optimizer, PLENTY, profile=profile) as room:
        for _ in plainest(job):
            pass
        optimizer._join_config = mock.Mock(enable=True)  # type: ignore[attr-defined]
        for _ in range(3):
            optimizer.step()
        del optimizer._join_config  # type: ignore[attr-defined]
        for _ in plainest(job):
            pass
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(room.journal().steps) == 2 * STEPS


def test_a_new_optimizer_ends_steps(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    job = make_state_job()
    with caplog.at_level(logging.WARNING, "elbowroom"), fit(job, profile, PLENTY) as room:
        job.optimizers = [torch.optim.SGD(job.model.parameters(), lr=0.1)]
        for _ in plainest(job):
            pass
        assert STEPS - 2 <= len(room.journal().steps) < STEPS
        assert not room._steps.is_inside
    assert caplog.text.count("an optimizer that elbowroom.fit was not given") == 1
    assert_nothing_attached(job)


class Twice(torch.optim.Optimizer):
    """Updates by another optimizer, twice."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.inner.step()


def test_an_optimizer_may_have_another_one_update(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    job = StateJob(model, [Twice(model.parameters())], lambda _: None)
    with caplog.at_level(logging.WARNING, "elbowroom"), fit(job, profile, PLENTY) as room:
        for index, _ in enumerate(plainest(job)):
            assert len(room.journal().steps) == index + 1
    assert not caplog.text


def test_a_dropped_room_says_so(profile: HardwareProfile, caplog: pytest.LogCaptureFixture) -> None:
    job = make_state_job()
    with caplog.at_level(logging.WARNING, "elbowroom"):
        fit(job, profile, PLENTY)
        gc.collect()
    assert "keep what elbowroom.fit returns" in caplog.text
    assert_nothing_attached(job)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "elbowroom"):
        room = fit(job, profile, PLENTY)
        next(plainest(job))
        del room
        gc.collect()
    assert "keep what" not in caplog.text
    assert_nothing_attached(job)


def test_a_part_in_torchscript_does_no_harm(profile: HardwareProfile) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(64, 64), scripted)
    job = StateJob(model, [adamw(model.parameters())], lambda _: None)
    with fit(job, profile, PLENTY) as room:
        for index, _ in enumerate(plainest(job)):
            assert len(room.journal().steps) == index + 1


def test_a_fit_that_fails_leaves_nothing_behind(profile: HardwareProfile) -> None:
    """An optimizer whose constructor does not call that of PyTorch has no hooks."""

    class Bare(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            self.param_groups = [{"params": list(parameters)}]
            self.state = {}  # type: ignore[assignment]

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):  # the model is not marked
        with pytest.raises(AttributeError):
            elbowroom.fit(model, [optimizer, Bare(model.parameters())], 1 << 30, profile=profile)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    elbowroom.fit(model, optimizer, 1 << 30, profile=profile).detach()


def test_the_optimizer_inside_another_one_ends_steps(profile: HardwareProfile) -> None:
    """Accelerate's optimizer holds one of PyTorch, and has no hooks of its own."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, *args: Any) -> None:  # type: ignore[override]
            self.optimizer.step(*args)

    model = nn.Linear(4, 4)
    optimizer = Wrapper(torch.optim.SGD(model.parameters()))
    with elbowroom.fit(model, optimizer, 1 << 30, profile=profile) as room:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert len(room.journal().steps) == 3


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_steps_that_grow_stay_watched(share: float, profile: HardwareProfile) -> None:
    """With two micro-batches where one fitted, twice and more often: the budget lies between what these take."""

    def train(budget_bytes: int, counts: list[int], **options: Any) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job, losses = StateJob(model, [optimizer], lambda _: None), []
        with fit(job, profile, budget_bytes, min_offload_bytes=256, **options) as room:
            for count in counts:
                for _ in range(count):
                    loss = model(torch.randn(64, 32)).square().mean()
                    loss.backward()
                    losses.append(float(loss.detach()))
                optimizer.step()
                optimizer.zero_grad()
        return losses, [each.peak_bytes or 0 for each in room.journal().steps]

    _, (one, two) = train(PLENTY, [1, 2], mode="dynamic")
    counts = [1, 1, 1, 2, 2, 2, 2]
    losses, _ = train(PLENTY, counts)
    budget_bytes = int(one + share * (two - one))
    found, peaks = train(budget_bytes, counts)
    assert found == losses and max(peaks) <= budget_bytes


def test_a_reload_that_is_refused_is_a_refusal(profile: HardwareProfile) -> None:
    """The program catches it and goes on: the next call of the model begins another step."""
    refused = []
    for budget_bytes in range(289_500, 293_000, 500):
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))
        model = nn.Sequential(*layers)
        optimizer = torch.optim.Adam(model.parameters())
        job = StateJob(model, [optimizer], lambda _: None)
        options = {"min_offload_bytes": 256, "manages": "activations", "mode": "dynamic"}
        with fit(job, profile, budget_bytes, **options) as room:
            for rows in (4, 4, 4, 4, 1):
                try:
                    model(torch.randn(rows, 12, 32)).square().mean().backward()
                except Infeasible as error:
                    assert room.was_refused
                    refused.append(error.op)
                    optimizer.zero_grad()
                else:
                    optimizer.step()
                    optimizer.zero_grad()
    assert any("reload" in each for each in refused), refused


def test_a_step_begins_with_the_teacher_that_is_called_first(profile: HardwareProfile) -> None:
    """From the second step on its forward pass is within the budget, but no evaluation begins a step."""
    width, rows = 128, 64

    def make(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 8))

    def train(job: StateJob, teacher: nn.Module) -> list[float]:
        losses = []
        for index in range(5):
            x = torch.linspace(-1, index + 1, rows * 8).reshape(rows, 8)
            with torch.no_grad():
                target = teacher(x)
            loss = (job.model(x) - target).square().mean()
            loss.backward()
            update(job)
            losses.append(float(loss.detach()))
            del target, loss
        return losses

    def make_job() -> tuple[StateJob, nn.Module]:
        torch.manual_seed(0)
        student, teacher = make(16), make(width).eval().requires_grad_(False)
        return StateJob(student, [torch.optim.AdamW(student.parameters())], lambda _: None), teacher

    losses = train(*make_job())
    job, teacher = make_job()
    budget_bytes = sum(each.nbytes for each in teacher.parameters()) + rows * width * 4
    models = [job.model, teacher]
    options = {"min_offload_bytes": MIN_BYTES, "profile": profile, "mode": "dynamic"}
    with elbowroom.fit(models, job.optimizers, budget_bytes, **options) as room:
        inside: list[bool] = []
        handle = teacher.register_forward_hook(lambda *_: inside.append(room._steps.is_inside))
        assert train(job, teacher) == losses
        handle.remove()
        assert inside == [False, True, True, True, True]
        assert len(room.journal().steps) == 5
        assert max(each.peak_bytes or 0 for each in room.journal().steps) <= budget_bytes
        with torch.inference_mode():
            teacher(torch.ones(2, 8))
        assert not room._steps.is_inside
        with torch.no_grad(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(teacher, torch.ones(2, 8)).result()
        job.model.eval()
        with torch.no_grad():
            teacher(torch.ones(2, 8))
        job.model.train()
        assert not room._steps.is_inside
        with torch.no_grad():
            teacher(torch.ones(2, 8))
            assert room._steps.is_inside  # it may be the next step's
            job.model(torch.ones(2, 8))
        assert not room._steps.is_inside
