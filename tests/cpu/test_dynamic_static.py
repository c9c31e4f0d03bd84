"""The models whose steps could be planned give the same bits where nothing is planned, from the first step on."""

from __future__ import annotations

import functools

import pytest

from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.runtime.step_runner import StepRunner
from tests.cpu.test_same_results import Outcome, train
from tests.models import MODELS
from tests.pressure import ask_at_every_request, let_everything_go

STEPS = 2
"""The second one is the first with all optimizer state, and with habits of its own."""

TIGHT, MODERATE = 0.1, 0.5
"""How far each budget lies on the way from the smallest one that works to the plain peak."""

SOME = ("gpt2_accumulation", "gpt2_bfloat16", "lstm", "mobilenet_v3_large", "unet")
"""One of each kind: with half of the way to go, more stays, and what leaves is of the kinds that leave with less."""


@functools.cache
def find_plain(name: str, profile: HardwareProfile) -> tuple[Outcome, int]:
    """What training leaves behind without a room, and its peak."""
    meter = ProfilerMeter()
    meter.start()
    outcome = train(name, None, profile, STEPS)[0]
    meter.stop()
    return outcome, meter.peak_bytes


@functools.cache
def find_least(name: str, profile: HardwareProfile) -> tuple[Outcome, int]:
    """What it leaves behind where all that may leave leaves before every op, and the room that this takes."""
    needed = [0]

    def note(runner: StepRunner, nbytes: int) -> None:
        let_everything_go(runner, nbytes)
        needed[0] = max(needed[0], runner._guard.ledger.live_bytes + nbytes)

    with pytest.MonkeyPatch.context() as patch:
        ask_at_every_request(patch, note)
        return train(name, 1 << 40, profile, STEPS, mode="dynamic", policy="lru")[0], needed[0]


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_bits_where_all_leaves_at_every_op(name: str, profile: HardwareProfile) -> None:
    assert find_least(name, profile)[0].differences(find_plain(name, profile)[0]) == []


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_bits_within_a_tight_budget(name: str, profile: HardwareProfile) -> None:
    expect_the_same_bits(name, TIGHT, profile)


@pytest.mark.parametrize("name", SOME)
def test_the_same_bits_within_a_moderate_budget(name: str, profile: HardwareProfile) -> None:
    expect_the_same_bits(name, MODERATE, profile)


def expect_the_same_bits(name: str, share: float, profile: HardwareProfile) -> None:
    expected, plain = find_plain(name, profile)
    least = find_least(name, profile)[1]
    assert least < plain, "nothing can move: this case shows nothing"
    budget = least + int(share * (plain - least))
    outcome, room = train(name, budget, profile, STEPS, mode="dynamic")
    assert room is not None
    assert outcome.differences(expected) == []
    records = room.journal().steps
    assert {record.mode for record in records} == {Mode.DYNAMIC}
    assert max(record.peak_bytes or 0 for record in records) <= budget
    assert any(record.offloaded_bytes or record.recomputed for record in records)
