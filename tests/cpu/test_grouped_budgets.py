"""Plans of state are made for the optimizer's step as it runs within the budget: over a few parameters at a time."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typer.testing import CliRunner

import elbowroom
from elbowroom.cli.main import make_app
from elbowroom.cost.price import price
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import pose
from tests.state_jobs import StateJob, assert_same, fit, list_tensors, make_job, make_model

QUICK = "auto:effort=0.02"
"""The planner with a short search."""


@pytest.mark.parametrize("kind", ["foreach", "fused"])
def test_the_smallest_budget_is_that_of_the_grouped_step(kind: str, profile: HardwareProfile) -> None:
    job = make_job(functools.partial(torch.optim.AdamW, lr=1e-2, **{kind: True}), make_model(4))
    step, model, optimizers = functools.partial(job.step, 0), job.model, job.optimizers
    options: dict[str, Any] = {"min_offload_bytes": 1, "profile": profile, "strategy": QUICK}
    smallest = elbowroom.smallest_budget(model, optimizers, step, **options)
    whole = elbowroom.capture(step, model, optimizers)
    problem = pose(whole, price(whole, profile), 1, min_offload_bytes=1, manages=Manages.EVERYTHING)
    assert smallest < 0.7 * problem.floor.peak_bytes
    with elbowroom.fit(model, optimizers, smallest, step=step, **options) as room:
        assert room.planned is not None and room.planned.plan.state
        for index in range(5):  # the real step has other ops than the fake one, and is captured again
            with room.step():
                job.step(index)
        assert {state.name for state in room.count_state()} >= {"parameters", "gradients", "optimizer state"}
        assert "optimizer state" in room.report() and "Manages everything" in room.report()
    with pytest.raises(Infeasible):
        elbowroom.fit(model, optimizers, smallest // 2, step=step, **options)


@pytest.mark.parametrize("make_optimizer", [torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.AdamW])
@pytest.mark.parametrize("share", [0.97, 0.88])
def test_plain_steps_update_in_groups_where_whole_updates_have_no_room(
    share: float, make_optimizer: Callable[..., Optimizer], profile: HardwareProfile
) -> None:
    """Captured steps update a few parameters at a time, so all that they need fits, and nothing has to leave."""

    def train(budget_bytes: int, **options: Any) -> tuple[dict[str, torch.Tensor], list[Mode], int]:
        job = make_job(functools.partial(make_optimizer, lr=1e-3, foreach=True), make_model(6))
        with fit(job, profile, budget_bytes, min_offload_bytes=1 << 10, **options) as room:
            losses = []
            for index in range(8):
                with room.step():
                    losses.append(job.step(index))
            records = room.journal().steps
        found = list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}
        return found, [each.mode for each in records], max(each.peak_bytes or 0 for each in records)

    expected, _, peak_bytes = train(1 << 40)
    found, modes, most_bytes = train(int(share * peak_bytes), mode="auto")
    assert_same(expected, found)
    assert most_bytes <= share * peak_bytes and Mode.PLAIN in modes


def add_a_group(job: StateJob, index: int) -> None:
    if index == 6:
        job.model.append(nn.Linear(job.model[0][0].in_features, 64))
        job.optimizers[0].add_param_group({"params": job.model[-1].parameters()})


def unfreeze(job: StateJob, index: int) -> None:
    for layer in job.model[:3]:
        layer.requires_grad_(index >= 6)


def keep_gradients(job: StateJob, index: int) -> None:
    if index % 3:
        job.optimizers[0].zero_grad = lambda: None  # type: ignore[method-assign]
    else:
        vars(job.optimizers[0]).pop("zero_grad", None)


@pytest.mark.parametrize("change", [add_a_group, unfreeze, keep_gradients])
@pytest.mark.parametrize("share", [0.95, 0.8, 0.6])
def test_steps_that_take_more_state_than_those_before(
    share: float, change: Callable[[StateJob, int], None], profile: HardwareProfile
) -> None:
    def train(budget_bytes: int, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
        job = make_job(functools.partial(torch.optim.AdamW, lr=1e-3, foreach=True), make_model(6))
        with fit(job, profile, budget_bytes, min_offload_bytes=1 << 10, **options) as room:
            losses = []
            for index in range(12):
                change(job, index)
                with room.step():
                    losses.append(job.step(index))
            peak_bytes = max(each.peak_bytes or 0 for each in room.journal().steps)
        return list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses)}, peak_bytes

    expected, peak_bytes = train(1 << 40)
    found, most_bytes = train(int(share * peak_bytes), mode="auto")
    assert_same(expected, found)
    assert most_bytes <= share * peak_bytes


SPEC = """
import torch
def build(batch=8, device='cpu'):
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(128, 128), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.randn(batch, 128)
    def step():
        loss = model(x).mean(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss
    return model, optimizer, step
"""


def call(*arguments: object) -> dict[str, Any]:
    """Run the program; its document."""
    result = CliRunner().invoke(make_app(), [*map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_commands_move_the_state_if_they_are_told_to(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, profile: HardwareProfile
) -> None:
    (tmp_path / "mostly_state.py").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    elbowroom.save(profile, "profile.json")
    spec, hardware, managing = "mostly_state:build", ("--hardware", "profile.json"), ("--manages", "everything")
    compare = ("compare", spec, "--budgets", "45%peak", "--strategies", f"{QUICK},keep_all", *hardware)
    alone, together = call(*compare), call(*compare, *managing)
    assert [entry["fits"] for entry in alone["entries"]] == [False, False]
    assert [entry["fits"] for entry in together["entries"]] == [True, False]
    assert together["plain_peak_bytes"] == alone["plain_peak_bytes"]
    assert together["smallest_budget_bytes"] < 0.5 * alone["smallest_budget_bytes"]
    entry = together["entries"][0]
    assert entry["bound_seconds"] <= entry["plan"]["step_seconds"] and together["manages"] == "everything"
    budget = together["entries"][0]["budget_bytes"]
    planned = call("plan", spec, "--budget", budget, "--strategy", QUICK, *hardware, *managing)
    assert planned["manages"] == "everything" and planned["forecast_peak_bytes"] <= budget
    moved = sum(each["offloaded_bytes"] for each in planned["state"])
    assert moved == planned["state_offloaded_bytes"] > 0
    run = ("run", spec, "--steps", 5, "--ahead", "--budget", budget, "--strategy", QUICK, *hardware)
    ran = call(*run, *managing)
    assert ran["manages"] == "everything" and sum(each["disk_bytes"] for each in ran["state"]) > 0
    assert CliRunner().invoke(make_app(), [*map(str, run), "--manages", "activations"]).exit_code == 3
