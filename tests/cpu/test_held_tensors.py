"""Loops whose variables hold the last step's results until the next step has computed its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import elbowroom
from elbowroom.errors import Infeasible
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ir.labels import HELD
from elbowroom.ir.outside import count_outside, set_outside
from elbowroom.ir.trace import Trace
from elbowroom.room import Room
from elbowroom.tracing.live import LiveCapture

WORDS, WIDTH, ROWS = 1000, 32, 128
STEPS = 8


def run(profile: HardwareProfile, budget_bytes: int, mode: str = "auto") -> tuple[list[float], Room, Trace | None]:
    """Train a language model whose logits and predictions are held. Return the losses, and the last plan's trace."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    options = {"profile": profile, "min_offload_bytes": 1 << 12, "op_time_store": False, "always_watch": True}
    with elbowroom.fit(model, optimizer, budget_bytes, mode=mode, **options) as room:
        for _ in range(STEPS):
            words = torch.randint(0, WORDS, (ROWS,))
            logits = model(words)
            loss = nn.functional.cross_entropy(logits, words.roll(1))
            predictions = logits.detach().softmax(-1)
            held = (logits, predictions)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        del held
        trace = None if room.planned is None else room.planned.trace
    return losses, room, trace


@pytest.mark.usefixtures("plans_at_once")
@pytest.mark.parametrize("share", [1.02, 0.9])
def test_a_plan_knows_when_they_are_freed(
    share: float, profile: HardwareProfile, caplog: pytest.LogCaptureFixture
) -> None:
    plain, room, _ = run(profile, 1 << 40, "dynamic")
    budget_bytes = int(share * max(each.peak_bytes or 0 for each in room.journal().steps))
    with caplog.at_level(logging.WARNING):
        losses, room, trace = run(profile, budget_bytes)
    assert losses == plain and "No plan fits" not in caplog.text
    steps = room.journal().steps
    assert max(each.peak_bytes or 0 for each in steps) <= budget_bytes
    assert steps[-1].mode is Mode.PLANNED and (steps[-1].offloaded_bytes > 0) == (share < 1)
    assert trace is not None
    freed = [each for each in trace.storages if each.label == HELD]
    assert sum(each.nbytes for each in freed) >= 0.95 * 2 * ROWS * WORDS * 4  # logits and predictions
    assert all(0 < each.released < trace.end for each in freed)


@pytest.mark.usefixtures("plans_at_once")
def test_what_comes_in_addition_is_not_freed(profile: HardwareProfile) -> None:
    *_, trace = run(profile, 1 << 40)
    assert trace is not None
    freed_bytes = sum(each.nbytes for each in trace.storages if each.label == HELD)
    base_bytes = sum(each.nbytes for each in trace.storages if each.created < 0)
    more, less = set_outside(trace, base_bytes + 1_000_000), set_outside(trace, base_bytes - freed_bytes // 2)
    assert freed_bytes > 0
    assert sum(each.nbytes for each in more.storages if each.label == HELD) == freed_bytes
    assert count_outside(more) == count_outside(trace) + 1_000_000
    assert sum(each.nbytes for each in less.storages if each.label == HELD) < freed_bytes


@pytest.mark.parametrize("share", [0.9, 0.3])
def test_live_bytes_tell_nothing_if_ops_ran_in_slices(
    share: float, profile: HardwareProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results that are made in the tier below look like memory that was freed."""
    _, room, _ = run(profile, 1 << 40, "dynamic")
    peak_bytes = max(each.peak_bytes or 0 for each in room.journal().steps)
    finish, traces = LiveCapture.finish, list[tuple[bool, Trace]]()

    def keep(capture: LiveCapture, *, has_slices: bool = False) -> Trace:
        traces.append((has_slices, finish(capture, has_slices=has_slices)))
        return traces[-1][1]

    monkeypatch.setattr(LiveCapture, "finish", keep)
    _, room, _ = run(profile, int(share * peak_bytes))
    assert (room.metrics().get("sliced_ops", 0) > 0) == (share < 0.5)
    adopted = [trace for has_slices, trace in traces if has_slices == (share < 0.5)]
    assert adopted
    assert any(each.label == HELD for trace in adopted for each in trace.storages) == (share > 0.5)


def test_a_generator_of_the_program_goes_on_after_an_error(profile: HardwareProfile) -> None:
    """It catches the error of its step, and is suspended as the loop raises it again."""
    model = nn.Sequential(nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters())

    def run_steps() -> Iterator[object]:
        for rows in (1 << 14, 2):
            try:
                model(torch.ones(rows, WIDTH)).sum().backward()
                yield "done"
            except Infeasible as error:
                yield error

    with elbowroom.fit(model, optimizer, 1 << 20, profile=profile, mode="dynamic") as room:
        steps = run_steps()
        with pytest.raises(Infeasible), room.step():
            raise next(steps)  # type: ignore[misc]
        with room.step():
            assert next(steps) == "done"
