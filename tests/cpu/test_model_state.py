"""Training whose parameters, gradients and optimizer state leave memory gives the bits of plain training."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.workloads._packages import import_package
from tests import state_jobs
from tests.state_jobs import (
    BUDGET,
    WIDTH,
    StateJob,
    adamw,
    assert_same,
    assert_trains_the_same,
    fit,
    get_pager,
    list_tensors,
    make_batch,
    make_job,
    make_model,
    run_plain,
)

transformers = import_package("transformers")

OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "sgd-foreach": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam-amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "adam-foreach": functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1, foreach=True),
    "adam-fused": functools.partial(torch.optim.Adam, lr=1e-2, fused=True),
    "adamw": adamw,
    "adamw-foreach": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw-fused": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adafactor": torch.optim.Adafactor,
    "adagrad-fused": functools.partial(torch.optim.Adagrad, fused=True),
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "nadam-foreach": functools.partial(torch.optim.NAdam, foreach=True),
    "radam": torch.optim.RAdam,
    "rmsprop": functools.partial(torch.optim.RMSprop, centered=True),
    "rprop": torch.optim.Rprop,
    "transformers-adafactor": transformers.Adafactor,
    "transformers-adafactor-momentum": functools.partial(
        transformers.Adafactor, lr=1e-2, relative_step=False, beta1=0.9
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, profile: HardwareProfile) -> None:
    assert_trains_the_same(lambda: make_job(OPTIMIZERS[name]), profile)


def test_a_step_of_an_optimizer_calls_each_hook_once(profile: HardwareProfile) -> None:
    calls: list[str] = []

    def note(what: str) -> Any:
        def hook(optimizer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            assert args[0] is optimizer
            assert len(optimizer.param_groups[0]["params"]) == 2 * state_jobs.LAYERS
            calls.append(what)

        return hook

    job = make_job(adamw)
    job.optimizers[0].register_step_pre_hook(note("before"))
    job.optimizers[0].register_step_post_hook(note("after"))
    everywhere = [
        register_optimizer_step_pre_hook(note("before any")),
        register_optimizer_step_post_hook(note("after any")),
    ]
    try:
        with fit(job, profile) as room:
            for index in range(3):
                calls.clear()
                with room.step():
                    job.step(index)
                assert get_pager(room).is_active
                assert calls == ["before any", "before", "after", "after any"]
    finally:
        for hook in everywhere:
            hook.remove()


@pytest.mark.parametrize("name", ["adamw", "transformers-adafactor", "sgd-foreach"])
def test_closures(name: str, profile: HardwareProfile) -> None:
    def make() -> StateJob:
        job = make_job(OPTIMIZERS[name])
        model, (optimizer,) = job.model, job.optimizers

        def step(index: int) -> torch.Tensor:
            @torch.enable_grad()  # type: ignore[untyped-decorator]
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(make_batch(index)).square().mean()
                loss.backward()
                return loss

            loss = optimizer.step(closure) if index % 2 else optimizer.step(closure=closure)
            return loss.detach()

        return dataclasses.replace(job, step=step)

    assert_trains_the_same(make, profile)


@pytest.mark.parametrize("is_before", [True, False])
def test_learning_rate_schedules(is_before: bool, profile: HardwareProfile) -> None:
    """Made before and after the optimizer steps in groups; both wrap its step."""

    def make() -> StateJob:
        job = make_job(adamw)
        optimizer, step = job.optimizers[0], job.step
        schedules: list[Any] = []

        def make_schedules() -> None:
            schedules.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda index: 1 / (1 + index)))
            schedules.append(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40))

        if is_before:
            make_schedules()

        def step_and_schedule(index: int) -> torch.Tensor:
            if index == 2 and not is_before:
                make_schedules()
            loss = step(index)
            for schedule in schedules:
                schedule.step()
            return loss

        return dataclasses.replace(job, step=step_and_schedule)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a schedule warns if it thinks that the optimizer was not stepped
        assert_trains_the_same(make, profile)


def make_clipped(*, foreach: bool | None, scaler: bool = False, set_to_none: bool = True, **options: Any) -> StateJob:
    job = make_job(functools.partial(torch.optim.AdamW, lr=1e-2, **options))
    model, (optimizer,) = job.model, job.optimizers
    scale = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaler)

    def step(index: int) -> torch.Tensor:
        for part in range(2):
            loss = model(make_batch(2 * index + part)).square().mean() / 2
            scale.scale(loss).backward()
        scale.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=foreach)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad(set_to_none=set_to_none)
        return norm

    return dataclasses.replace(job, step=step)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_of_accumulated_gradients(foreach: bool, set_to_none: bool, profile: HardwareProfile) -> None:
    """With foreach, one op takes all gradients."""
    assert_trains_the_same(lambda: make_clipped(foreach=foreach, set_to_none=set_to_none), profile)


@pytest.mark.parametrize("fused", [True, False])
def test_scaled_gradients(fused: bool, profile: HardwareProfile) -> None:
    assert_trains_the_same(lambda: make_clipped(foreach=None, scaler=True, fused=fused), profile)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(160, WIDTH)
        self.body = make_model(6, functools.partial(nn.Dropout, 0.1))
        self.head = nn.Linear(WIDTH, 160, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, index: int) -> torch.Tensor:
        tokens = torch.randint(0, 160, (state_jobs.ROWS,), generator=torch.Generator().manual_seed(index))
        scores: torch.Tensor = self.head(self.body(self.embedding(tokens)))
        return functional.cross_entropy(scores, tokens)


def make_step(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> Any:
    def step(index: int) -> torch.Tensor:
        loss = model(index)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    return step


def test_tied_and_frozen_parameters_and_two_optimizers(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        torch.manual_seed(0)
        model = Tied()
        model.body[1].requires_grad_(False)
        groups = [
            {"params": model.body[0].parameters(), "lr": 1e-3},
            {"params": model.body[2:4].parameters(), "weight_decay": 0.5},
        ]
        rest = [model.embedding.weight, *model.body[4:].parameters()]
        optimizers = [adamw(groups), torch.optim.SGD(rest, lr=0.1, momentum=0.9, foreach=True)]
        torch.manual_seed(1)
        return StateJob(model, optimizers, make_step(model, optimizers))

    assert_trains_the_same(make, profile, BUDGET)


def test_copies_that_average_the_parameters(profile: HardwareProfile) -> None:
    """They belong to no module of the job's, and stay in memory, which counts for the room while steps use them."""

    def make() -> StateJob:
        job = make_job(adamw)
        average = AveragedModel(job.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        step = job.step

        def step_and_average(index: int) -> torch.Tensor:
            loss = step(index)
            average.update_parameters(job.model)
            return loss

        return dataclasses.replace(
            job,
            step=step_and_average,
            others=lambda: {f"average {name}": each for name, each in average.named_parameters()},
        )

    assert_trains_the_same(make, profile, elsewhere_bytes=state_jobs.PARAMETER_BYTES)


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def test_frozen_weights_are_written_once(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        torch.manual_seed(0)
        return make_job(adamw, nn.Sequential(*(Adapted() for _ in range(12))))

    job = make()
    with fit(job, profile, 5 * state_jobs.PARAMETER_BYTES // 8, min_offload_bytes=4096) as room:
        pager = get_pager(room)
        for index in range(6):
            with room.step():
                job.step(index)
        frozen_bytes = 12 * WIDTH * WIDTH * 4
        assert pager.storages.reloaded_bytes > 3 * frozen_bytes
        assert pager.storages.offloaded_bytes <= frozen_bytes
        found = list_tensors(job)
    plain = run_plain(make, 6)
    assert_same(found, {what: each for what, each in plain.items() if not what.startswith("loss")})


def test_sparse_gradients(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        torch.manual_seed(0)
        embeddings = nn.ModuleList(nn.Embedding(100, WIDTH, sparse=True) for _ in range(10))
        optimizer = torch.optim.SparseAdam(list(embeddings.parameters()), lr=1e-2)

        def step(index: int) -> torch.Tensor:
            tokens = torch.randint(0, 100, (3,), generator=torch.Generator().manual_seed(index))
            loss = sum(each(tokens).square().mean() for each in embeddings)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(embeddings, [optimizer], step)

    assert_trains_the_same(make, profile)


def test_normalization_dropout_checkpointing_and_autocast(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        model = make_model(
            state_jobs.LAYERS, functools.partial(nn.BatchNorm1d, WIDTH), functools.partial(nn.Dropout, 0.2)
        )
        optimizer = adamw(model.parameters())
        torch.manual_seed(5)

        def step(index: int) -> torch.Tensor:
            x = make_batch(index, 16)
            with torch.autocast("cpu", torch.bfloat16):
                for position, block in enumerate(model):
                    x = checkpoint(block, x, use_reentrant=position % 4 == 2) if position % 2 else block(x)
            loss = x.float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    assert_trains_the_same(make, profile)


def test_updates_in_the_backward_pass(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        model = make_model()
        optimizers = {each: adamw([each]) for each in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(update)

        def step(index: int) -> torch.Tensor:
            loss = model(make_batch(index)).square().mean()
            loss.backward()
            return loss.detach()

        return StateJob(model, list(optimizers.values()), step)

    assert_trains_the_same(make, profile, 9 * state_jobs.PARAMETER_BYTES // 10)


def test_an_optimizer_whose_update_takes_all_parameters(profile: HardwareProfile) -> None:
    """L-BFGS works on all parameters at once, and holds a copy of its own."""

    def make() -> StateJob:
        job = make_job(functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=2))
        model, (optimizer,) = job.model, job.optimizers

        def step(index: int) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(make_batch(index)).square().mean()
                loss.backward()
                return loss

            return optimizer.step(closure).detach()

        return dataclasses.replace(job, step=step)

    assert_trains_the_same(make, profile, 7 * state_jobs.PARAMETER_BYTES)
    job = make()
    with fit(job, profile) as room:
        message = "parameters, gradients and optimizer state that it uses"
        with pytest.raises(Infeasible, match=message), room.step():
            job.step(0)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_blocks(backend: str, profile: HardwareProfile) -> None:
    def make() -> StateJob:
        torch._dynamo.reset()
        model = make_model(state_jobs.LAYERS)
        for block in model:
            block.compile(backend=backend)
        return make_job(adamw, model)

    assert_trains_the_same(make, profile)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_module(profile: HardwareProfile) -> None:
    def make() -> StateJob:
        return make_job(adamw, torch.jit.trace(make_model(), batch))

    batch = make_batch(0)
    assert_trains_the_same(make, profile, elsewhere_bytes=batch.nbytes)


def test_a_pruned_weight_counts_from_the_beginning(profile: HardwareProfile) -> None:
    """It is an attribute of its module, neither parameter nor buffer."""
    job = make_job(adamw)
    for layer in job.model.modules():
        if isinstance(layer, nn.Linear):
            prune.random_unstructured(layer, "weight", amount=0.2)
    attributes = [each.weight for each in job.model.modules() if isinstance(each, nn.Linear)]
    foreign = torch.from_numpy(np.zeros(BUDGET, np.uint8))  # as large as the budget, and PyTorch has not allocated it
    job.model.table = foreign  # type: ignore[assignment]
    with fit(job, profile) as room:
        residents = room._job.list_residents()
        assert not {id(each) for each in attributes} & {id(each) for each in residents}
        own_bytes = sum(each.nbytes for each in [*residents, *attributes])
        assert own_bytes <= room._ledger.live_bytes < own_bytes + foreign.nbytes
