"""Jobs of ranks under `fully_shard` whose plans replay ops that read gathered weights. See `rank_jobs.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import elbowroom
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


def train_cases(rank: int, cases: list[tuple[str, list[int], dict[str, Any]]], profile: HardwareProfile) -> Any:
    """Train cases plain (None) and in rooms, by name and budget."""
    return {
        (name, budget): train(rank, CASES[name], budget, profile, **options)
        for name, budgets, options in cases
        for budget in (None, *budgets)
    }
