"""Steps whose kind the shapes of the model's inputs tell: those in which everything fits run without a runner, and the
others follow their plan from the call of the model on.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.step_runner import StepRunner
from tests.cpu.test_plan_cache import WIDTH, Made, compare, find_plain_peak, finish, make_exits, make_lengths

LENGTHS = (24, 40, 64)
LEARNING = [*(length for length in LENGTHS for _ in range(8)), *LENGTHS * 6]
"""After these steps, all plans are known, and what they take is."""

ORDER = random.Random(3).choices(LENGTHS, k=24)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Phase, bool]]:
    """For each runner, the phase in which it began, and whether the step had begun before: it draws its batch."""
    found: list[tuple[Phase, bool]] = []
    make = StepRunner.__init__

    def note(runner: StepRunner, phase: Phase, *args: object, skipped_ops: int = 0, **options: object) -> None:
        found.append((phase, skipped_ops > 0))
        make(runner, phase, *args, skipped_ops=skipped_ops, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(StepRunner, "__init__", note)
    return found


@pytest.mark.usefixtures("plans_at_once")
@pytest.mark.parametrize(("share", "moved"), [(1.1, ()), (0.7, (64,)), (0.5, (40, 64))])
def test_the_inputs_tell_which_plan_a_step_follows(
    share: float, moved: Sequence[int], profile: HardwareProfile, begun: list[tuple[Phase, bool]]
) -> None:
    budget = int(share * find_plain_peak(make_lengths, 64, profile))
    begun.clear()
    room, records = compare(make_lengths, [*LEARNING, *ORDER], budget, profile)
    assert len(room._cache.entries) == len(LENGTHS)
    modes = [Mode.PLANNED if length in moved else Mode.PLAIN for length in ORDER]
    last = records[-len(ORDER) :]
    assert [each.mode for each in last] == modes, [(each.step, str(each.mode), each.note) for each in records]
    assert all(each.offloaded_bytes or each.recomputed for each in last if each.mode is Mode.PLANNED)
    runners = sum(length in moved for length in ORDER)
    assert begun[len(begun) - runners :] == [(Phase.FOLLOWING_PLAN, True)] * runners


@pytest.mark.usefixtures("plans_at_once")
def test_a_step_with_unknown_inputs_is_watched_from_its_call_on(
    profile: HardwareProfile, begun: list[tuple[Phase, bool]]
) -> None:
    """It is larger than all others, and finds room as they do."""
    budget = int(0.6 * find_plain_peak(make_lengths, 64, profile))
    lengths = [each for each in LEARNING if each < 64]
    _, records = compare(make_lengths, [*lengths, 40, 64, 24], budget, profile)
    assert [each.mode for each in records[-3:]] == [Mode.PLAIN, Mode.DRIFTED, Mode.PLAIN]
    assert begun[-1] == (Phase.MANAGED, False) and records[-2].offloaded_bytes + records[-2].recomputed > 0


def make_with(before: str) -> Made:
    """Steps that have to be watched from their beginning."""
    model, optimizer, _ = make_lengths()
    scale = torch.ones(WIDTH, requires_grad=True)

    def step(index: int, length: int) -> torch.Tensor:
        x = torch.randn(8, length, WIDTH, generator=torch.Generator().manual_seed(index))
        if before == "a large temporary":
            x = x + torch.zeros(1 << 19).sum()  # 2 MiB, when the optimizer's state is away
        elif before == "saved tensors":
            for _ in range(8):
                x = (x * scale).tanh()
        elif before == "a call without gradients":
            with torch.no_grad():
                x = x + model(x)
        if before == "a call in the backward pass":
            return finish(model, optimizer, checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean())
        return finish(model, optimizer, model(x).square().mean())

    return model, optimizer, step


@pytest.mark.usefixtures("plans_at_once")
@pytest.mark.parametrize(
    "before", ["a large temporary", "saved tensors", "a call without gradients", "a call in the backward pass"]
)
def test_steps_with_other_work_are_watched_from_their_beginning(
    before: str, profile: HardwareProfile, begun: list[tuple[Phase, bool]]
) -> None:
    make = functools.partial(make_with, before)
    budget = int((0.3 if before == "a large temporary" else 0.5) * find_plain_peak(make, 64, profile))
    _, records = compare(make, [*LEARNING, *ORDER], budget, profile)
    if before != "a large temporary":  # until a plan moves state, it is no obstacle
        assert not any(has_begun for _, has_begun in begun)
    moved = [each for each, length in zip(records[-len(ORDER) :], ORDER, strict=True) if length == 64]
    assert {each.mode for each in moved} == {Mode.PLANNED}


@pytest.mark.usefixtures("plans_at_once")
def test_inputs_that_several_kinds_have_in_common_tell_nothing(
    profile: HardwareProfile, begun: list[tuple[Phase, bool]]
) -> None:
    budget = int(0.6 * find_plain_peak(make_exits, 9, profile))
    _, records = compare(make_exits, (9, 8, 7) * 14, budget, profile)
    assert {each.mode for each in records[-3:]} == {Mode.PLANNED}
    assert not any(has_begun for _, has_begun in begun)
