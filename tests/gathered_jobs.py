"""Jobs of ranks under `fully_shard` whose plans replay ops that read gathered weights. See `rank_jobs.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

import elbowroom
from elbowroom.errors import SavedTensorLost
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.runtime import action_executor
from tests import rank_jobs
from tests.rank_jobs import CASES, RankCase

Replay = tuple[str, ...]
"""The names of the ops of one replay."""

OPTIONS: dict[str, Any] = {"manages": "activations", "strategy": "recompute_all", "min_offload_bytes": 1 << 10}


@dataclasses.dataclass
class Replayed:
    """A job in a room: tensors to compare, modes and peaks of its steps, and the replays of its last step.

    Attributes:
        planned: by the plan, in order.
        reading: how many of those read a gathered weight.
        executed: in order.
    """

    tensors: dict[str, torch.Tensor]
    modes: list[str] = dataclasses.field(default_factory=list)
    peaks: list[int] = dataclasses.field(default_factory=list)
    planned: list[Replay] = dataclasses.field(default_factory=list)
    reading: int = 0
    executed: list[Replay] = dataclasses.field(default_factory=list)


def train(rank: int, case: RankCase, budget: int | None, profile: HardwareProfile, **options: Any) -> Replayed:
    """Train six steps, in a room if there is a budget."""
    torch.manual_seed(0)
    model = case.spread(case.model())
    optimizer = case.optimizer(model.parameters())
    if budget is None:
        for index in range(6):
            optimizer.zero_grad()
            rank_jobs._step(rank, case, model, optimizer, index)
        return Replayed(rank_jobs._list_tensors(model, optimizer))
    with elbowroom.fit(model, optimizer, budget, **{**OPTIONS, "profile": profile, **options}) as room:
        for index in range(6):
            optimizer.zero_grad()
            with listing_replays() as executed, room.step():
                rank_jobs._step(rank, case, model, optimizer, index)
        planned, reading = list_planned(room)
        steps = room.journal().steps
        return Replayed(
            rank_jobs._list_tensors(model, optimizer),
            [each.mode.value for each in steps], [each.peak_bytes or 0 for each in steps], planned, reading, executed,
        )  # fmt: skip


@contextmanager
def listing_replays() -> Iterator[list[Replay]]:
    """List the replays that are carried out."""
    found: list[Replay] = []
    replay = action_executor.replay

    def note(recordings: Any, outputs: Any) -> None:
        ops = {place: name for each in recordings for place, name in zip(each.places, each.names, strict=True)}
        replay(recordings, outputs)
        found.append(tuple(ops[place] for place in sorted(ops)))

    with mock.patch.object(action_executor, "replay", note):
        yield found


def list_planned(room: Room) -> tuple[list[Replay], int]:
    """List the replays of a room's plan, and count those that read gathered weights."""
    entry = room._modes._cache.current
    if entry is None:
        return [], 0
    trace, plan = entry.planned.trace, entry.planned.plan
    names = {op.tick: op.name for op in trace.ops}
    backs: dict[int, int] = {}
    for each in plan.decisions:
        if each.segment >= 0:
            backs[each.segment] = min(each.back, backs.get(each.segment, trace.end))
    order = sorted(backs, key=backs.__getitem__)
    reading = sum(bool(trace.present.keys() & set(each.leaves)) for each in plan.segments)
    return [tuple(names[tick] for tick in plan.segments[index].ops) for index in order], reading


# -- steps that differ from those before -------------------------------------------------------------------------------

USUAL_STEPS = 4
"""Of which the last follows the plan."""

Changed = tuple[dict[str, torch.Tensor], str]
"""Tensors to compare, and the error of the changed step."""


def update_unseen(rank: int, model: nn.Module) -> None:
    """Update one weight, without a trace in its version."""
    _find_shard(model).data.neg_()


def update_on_one_rank(rank: int, model: nn.Module) -> None:
    """Update the own shard of one weight on one rank alone."""
    if rank == 1:
        _find_shard(model).data.view(-1)[0] += 1


def _find_shard(model: nn.Module) -> torch.Tensor:
    return model.layers[1].up.weight.to_local()  # type: ignore[union-attr, no-any-return]


def change_step(rank: int, how: str, profile: HardwareProfile | None) -> Changed:
    """Train, with another fifth step. Return tensors to compare, and the error of that step.

    Args:
        how: "skips" the backward pass; does it "twice"; "exposes" to NumPy, which writes to it, what a block was given;
            goes "inside" a block whose weights are not gathered; or the name of a function that updates weights.
        profile: for a room; None for none.
    """
    torch.manual_seed(0)
    case = CASES["sharded decoders"]
    model = case.spread(case.model())
    optimizer = case.optimizer(model.parameters())
    inner: list[torch.Tensor] = []
    inputs: list[torch.Tensor] = []
    options = {**OPTIONS, "profile": profile}
    room = None if profile is None else elbowroom.fit(model, optimizer, 4_400_000, **options)
    error = ""
    with nullcontext() if room is None else room:
        for index in range(USUAL_STEPS):
            optimizer.zero_grad()
            with nullcontext() if room is None else room.step():
                rank_jobs._step(rank, case, model, optimizer, index)
        assert room is None or room.journal().steps[-1].mode.value == "planned"
        optimizer.zero_grad()
        layer: Any = model.layers[1]  # type: ignore[index]
        handles = [
            layer.up.register_forward_hook(lambda module, given, made: inner.append(made)),
            layer.register_forward_pre_hook(lambda module, given: inputs.append(given[0])),
        ]
        try:
            with nullcontext() if room is None else room.step():
                _change(rank, model, case, how, inner, inputs)
                optimizer.step()
        except SavedTensorLost as raised:
            error = str(raised)
        for handle in handles:
            handle.remove()
        inner.clear()
        inputs.clear()
        if not error:
            for index in (5, 6):
                optimizer.zero_grad()
                with nullcontext() if room is None else room.step():
                    rank_jobs._step(rank, case, model, optimizer, index)
    return rank_jobs._list_tensors(model, optimizer), error


def _change(
    rank: int, model: nn.Module, case: RankCase, how: str, inner: list[torch.Tensor], given: list[torch.Tensor]
) -> None:
    batch = torch.randn(case.shape, generator=torch.Generator().manual_seed(rank))
    loss = model(batch)
    if how == "inside":
        torch.autograd.grad(functional.gelu(inner[0]).sum(), inner[0])
    elif how == "exposes":
        shown = given[0].detach().numpy()
        loss = 1 * loss  # an op between, as there may be
        shown += 1.0
        loss.backward()
    elif how == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif how != "skips":
        globals()[how](rank, model)
        loss.backward()


def run_all(
    rank: int, cases: Sequence[tuple[str, list[int]]], ways: Sequence[str], profile: HardwareProfile
) -> tuple[dict[tuple[str, int | None], Replayed], dict[str, tuple[Changed, Changed]]]:
    """Train cases plain (None) and in rooms, by name and budget; and change steps, without rooms and in rooms."""
    trained = {
        (name, budget): train(rank, CASES[name], budget, profile)
        for name, budgets in cases
        for budget in (None, *budgets)
    }
    return trained, {how: (change_step(rank, how, None), change_step(rank, how, profile)) for how in ways}
