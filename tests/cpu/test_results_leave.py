"""Results of ops that the program or autograd's engine holds: they leave in place when nothing else may."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from tests.pressure import ask_at_every_request, let_results_go
from tests.state_jobs import StateJob, assert_same, run_plain, run_within

pytestmark = pytest.mark.usefixtures("two_threads")

ROWS, WIDTH, INNER = 512, 64, 256
STEPS = 4


def make_job(find_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> StateJob:
    """A job whose loss is computed by a function of the model and a batch, which may set the gradients itself."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, INNER), nn.Tanh(), nn.Linear(INNER, 4)
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(ROWS * WIDTH) for _ in range(STEPS)]  # older than the room

    def step(index: int) -> torch.Tensor:
        loss = find_loss(model, batches[index].view(ROWS, WIDTH))
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def penalize_gradients(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.requires_grad_()
    y = model(batch)
    (gradient,) = torch.autograd.grad(y.sum(), batch, create_graph=True)
    return y.square().mean() + 1e-3 * gradient.square().sum()


def penalize_jacobians(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.requires_grad_()
    y = model(batch)
    (jacobian,) = torch.autograd.grad(y.sum(0), batch, torch.eye(4), is_grads_batched=True, create_graph=True)
    return y.square().mean() + 1e-3 * jacobian.square().sum()


def follow_a_teacher(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The program holds the features of a model that is not trained."""
    features = [batch]
    with torch.no_grad():
        for layer in model:
            features.append(layer(features[-1] + 1).sin())
    outputs = [batch]
    for layer in model:
        outputs.append(layer(outputs[-1]))
    return sum((one - other).square().mean() for one, other in zip(features[1:], outputs[1:], strict=True))


def supervise_each_layer(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The program holds what autograd has saved."""
    outputs = [model[0](batch)]
    for _ in range(20):
        outputs.append(model[2](outputs[-1]).tanh())
    return sum(each.square().mean() for each in outputs)


def checkpoint_selectively(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The checkpoints hold products, and dropout begins by allocating its result."""

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(model[0](x)), 0.1)
        return hidden.unflatten(1, (INNER // WIDTH, WIDTH)).mean(1)

    x = batch.requires_grad_()
    make_contexts = functools.partial(create_selective_checkpoint_contexts, choose)
    for _ in range(12):
        x = x + checkpoint(run, x, use_reentrant=False, context_fn=make_contexts)
    return x.square().mean()


def clip_each_example(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Gradients by example, which nothing but the program holds."""

    def find_loss(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (row,)).square().sum()

    parameters = {name: each.detach() for name, each in model.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(find_loss), (None, 0))(parameters, batch[:32])
    for name, parameter in model.named_parameters():
        parameter.grad = gradients.pop(name).clamp(-1, 1).mean(0)
    return parameters["0.bias"].sum()


def mix_with_functional_gradients(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """While the model is called, its parameters are wrappers without a storage."""

    def find_loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (batch,)).square().sum()

    loss = model(batch).square().mean()
    gradients = torch.func.grad(find_loss)({name: each.detach() for name, each in model.named_parameters()})
    loss.backward()
    for name, parameter in model.named_parameters():
        parameter.grad += 1e-3 * gradients.pop(name)
    return loss.detach()


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize(
    ("find_loss", "budget_bytes"),
    [
        (penalize_gradients, 4_300_000),
        (penalize_jacobians, 6_600_000),
        (follow_a_teacher, 3_300_000),
        (supervise_each_layer, 6_000_000),
        (supervise_each_layer, 14_000_000),
        (checkpoint_selectively, 3_600_000),
        (clip_each_example, 9_000_000),
        (mix_with_functional_gradients, 3_400_000),
    ],
)
def test_jobs_that_hold_much(
    find_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    budget_bytes: int,
    mode: str,
    profile: HardwareProfile,
) -> None:
    def make() -> StateJob:
        return make_job(find_loss)

    found = run_within(make, profile, budget_bytes, STEPS, elsewhere_bytes=STEPS * ROWS * WIDTH * 4, mode=mode)
    assert_same(run_plain(make, STEPS), found)


@pytest.mark.parametrize("mode", ["dynamic", "auto"])
@pytest.mark.parametrize("budget_bytes", [320_000, 546_000])
def test_results_leave_in_every_step_where_all_state_is_small(
    budget_bytes: int, mode: str, profile: HardwareProfile
) -> None:
    """After a step that had too little room, state may leave, and ops are watched for that only if there is some."""

    def make() -> StateJob:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten(),
            nn.Linear(392, 1),
        )  # fmt: skip
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        batches = torch.randn(STEPS, 6, 3, 16, 16)

        def step(index: int) -> torch.Tensor:
            loss = penalize_gradients(model, batches[index].clone())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    found = run_within(make, profile, budget_bytes, STEPS, mode=mode, min_offload_bytes=1 << 12, is_metered=False)
    assert_same(run_plain(make, STEPS), found)


class HoldsFeatures(nn.Module):
    """A model that holds what it computes without autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        with torch.no_grad():
            features = [torch.tanh(hidden + 0.01 * index) for index in range(40)]
            mean = sum(each.mean(1, keepdim=True) for each in features)
        return self.last(torch.relu(hidden + mean))


@pytest.mark.parametrize("budget_bytes", [11_000_000, 5_000_000])
def test_steps_of_another_length_hold_much(budget_bytes: int, profile: HardwareProfile) -> None:
    """A step begins like one that is known, and turns out to be larger."""

    def make() -> StateJob:
        torch.manual_seed(0)
        model = HoldsFeatures()
        optimizer = torch.optim.AdamW(model.parameters())

        def step(index: int) -> torch.Tensor:
            loss = model(torch.randn(8, 32 if index % 2 else 96, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return StateJob(model, [optimizer], step)

    found = run_within(make, profile, budget_bytes, 6, mode="auto", min_offload_bytes=1024)
    assert_same(run_plain(make, 6), found)


def test_a_plan_is_left_inside_functional_call(profile: HardwareProfile) -> None:
    """The model's parameters are wrappers then, which have no storage."""

    def run(budget_bytes: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [each for _ in range(5) for each in (nn.Linear(192, 192), nn.GELU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        options = {"min_offload_bytes": 1024, "profile": profile}
        room = None if budget_bytes is None else elbowroom.fit(model, optimizer, budget_bytes, **options)
        for index in range(7):
            with contextlib.nullcontext() if room is None else room.step():
                loss = model(torch.randn(2000, 192)).square().mean()
                rows = torch.randn(300 if index < 4 else 900, 192)

                def find_loss(parameters: Any, rows: torch.Tensor = rows) -> torch.Tensor:
                    return torch.func.functional_call(model, parameters, (rows,)).square().mean()

                gradients = torch.func.grad(find_loss)({name: each.detach() for name, each in model.named_parameters()})
                optimizer.zero_grad()
                loss.backward()
                for name, parameter in model.named_parameters():
                    parameter.grad += 0.1 * gradients.pop(name)
                optimizer.step()
                del loss
        if room is not None:
            assert Mode.PLANNED in {record.mode for record in room.journal().steps}
            room.detach()
        return list(model.state_dict().values())

    assert all(torch.equal(*pair) for pair in zip(run(None), run(12_000_000), strict=True))


def test_what_checkpointing_computes_again_is_no_gradient(profile: HardwareProfile) -> None:
    """The results that may be gradients stay in distributed jobs, as their addresses are read there."""
    seen: list[tuple[bool, list[bool]]] = []

    class Looks(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            self.look(rows, is_gradient=False)
            rows.register_hook(functools.partial(self.look, is_gradient=True))
            return rows.tanh()

        def look(self, found: torch.Tensor, is_gradient: bool) -> None:
            runner = room._modes.runner
            assert runner is not None
            storage = found.untyped_storage()
            listed = runner.state.watcher.list_results()
            seen.append((is_gradient, [may_be for each, may_be in listed if each._cdata == storage._cdata]))

    model = nn.Sequential(nn.Linear(WIDTH, INNER), Looks(), nn.Linear(INNER, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with elbowroom.fit(model, optimizer, 4_000_000, mode="dynamic", min_offload_bytes=1024, profile=profile) as room:
        with room.step():
            checkpoint(model, torch.randn(ROWS, WIDTH), use_reentrant=False).square().mean().backward()
        assert seen == [(False, [False]), (False, [False]), (True, [True])]


def multiply_sparse(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A sparse tensor holds a result, and ops that read it do not tell."""
    hidden = model[0](batch)
    indices = torch.arange(ROWS).expand(2, ROWS)
    with torch.no_grad():
        weights = torch.sparse_coo_tensor(indices, hidden[:, 0].sin(), (ROWS, ROWS))
    mixed = torch.sparse.mm(weights, hidden) + hidden
    return model[4](model[3](model[2](mixed.tanh()))).square().mean()


@pytest.mark.parametrize("find_loss", [penalize_jacobians, follow_a_teacher, supervise_each_layer, multiply_sparse])
def test_all_leave_at_each_request(
    find_loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    profile: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(budget_bytes: int | None) -> list[torch.Tensor]:
        job = make_job(find_loss)
        options = {"mode": "dynamic", "min_offload_bytes": 1, "profile": profile}
        if budget_bytes is None:
            return [*map(job.step, range(2)), *job.model.state_dict().values()]
        with elbowroom.fit(job.model, job.optimizers, budget_bytes, **options) as room:
            losses = []
            for index in range(2):
                with room.step():
                    losses.append(job.step(index))
        return [*losses, *job.model.state_dict().values()]

    expected = run(None)
    ask_at_every_request(monkeypatch, let_results_go)
    assert all(torch.equal(*pair) for pair in zip(expected, run(1 << 40), strict=True))


def adapt_to_tasks(index: int, model: nn.Module) -> torch.Tensor:
    """Three tasks, to each of which a copy of the weights is adapted by two steps, through which gradients flow."""
    batches = torch.randn(12, 48, 8, generator=torch.Generator().manual_seed(index))
    total = torch.zeros(())
    for first, aim, second, other in batches.view(3, 4, 48, 8):
        weights: dict[str, torch.Tensor] = dict(model.named_parameters())
        for _ in range(2):
            loss = (torch.func.functional_call(model, weights, (first,)) - aim).square().mean()
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: each - 0.1 * step for (name, each), step in zip(weights.items(), found, strict=True)}
        loss = (torch.func.functional_call(model, weights, (second,)) - other).square().mean()
        loss.backward()
        total += loss.detach()
    return total


@pytest.mark.parametrize("budget_bytes", [440_000, 520_000, 600_000])
def test_results_leave_for_a_replay_that_was_refused(budget_bytes: int, profile: HardwareProfile) -> None:
    """The program holds adapted weights, which a long replay does not read."""

    def make() -> StateJob:
        torch.manual_seed(0)
        sizes = (8, 96, 96, 96, 8)
        layers = [(nn.Linear(one, other), nn.GELU()) for one, other in itertools.pairwise(sizes)]
        model = nn.Sequential(*itertools.chain(*layers))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def step(index: int) -> torch.Tensor:
            total = adapt_to_tasks(index, model)
            optimizer.step()
            optimizer.zero_grad()
            return total

        return StateJob(model, [optimizer], step)

    found = run_within(make, profile, budget_bytes, STEPS, 12 * 48 * 8 * 4, mode="dynamic", policy="dtr")
    assert_same(run_plain(make, STEPS), found)
