"""Training within a budget gives the bits of training without one, and holds the budget it forecast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import elbowroom
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.planner.problem import pose
from elbowroom.room import Room
from tests.models import MODELS, Step

pytestmark = pytest.mark.usefixtures("two_threads")

STEPS = 4
"""The first two are captured, three where the second differs; the others follow the plan."""

LATER_STEPS = 2
"""Within a larger budget, by another plan."""

SHARES = (1 / 3, 2 / 3)
"""How far the second budget lies on the way from the smallest one that works to the plain peak, in turn."""

CASES = [(name, SHARES[index % 2]) for index, name in enumerate(sorted(MODELS))]

STRATEGY = "auto:effort=0.05"
"""Any plan must give the same bits, so that a twentieth of the usual search for a fast one is enough."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What training left behind."""

    losses: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]
    random_state: torch.Tensor

    def differences(self, other: Outcome) -> list[str]:
        """Where two outcomes differ in so much as a bit."""
        found = []
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
            found += [f"{field.name}[{index}]" for index, pair in enumerate(pairs) if not same_bits(*pair)]
        return found


def same_bits(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))


def train(
    name: str,
    budget_bytes: int | None,
    profile: HardwareProfile,
    steps: int = STEPS,
    at_step: Callable[[int, Room], None] = lambda index, room: None,
    **options: Any,
) -> tuple[Outcome, Room | None]:
    """Train, in a room if there is a budget. `at_step` is called before each step in a room."""
    model, optimizer, step = MODELS[name]().make()
    room = None
    if budget_bytes is not None:
        room = elbowroom.fit(model, optimizer, budget_bytes, profile=profile, **options)
    losses = []
    for index in range(steps):
        if room is not None:
            at_step(index, room)
        if index == steps - 1:
            optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign, misc]
        losses.append(run_step(room, step, index))
    outcome = Outcome(
        losses,
        [parameter.grad for parameter in model.parameters()],
        [parameter.detach() for parameter in model.parameters()],
        list(model.buffers()),
        torch.get_rng_state(),
    )
    if room is not None:
        room.detach()
    return outcome, room


def run_step(room: Room | None, step: Step, index: int) -> torch.Tensor:
    if room is None:
        return step(index)
    with room.step():
        return step(index)


def find_range(name: str, profile: HardwareProfile) -> tuple[int, int]:
    """The smallest budget that works, and the plain peak."""
    _, room = train(name, 1 << 40, profile, steps=2)
    assert room is not None and room.planned is not None
    floor = pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes
    plain = room.planned.forecast.peak_bytes
    assert floor < plain, "nothing can move: this case shows nothing"
    return floor, plain


@pytest.mark.parametrize(("name", "share"), CASES)
def test_the_same_bits_within_the_budget(name: str, share: float, profile: HardwareProfile) -> None:
    smallest, most = find_range(name, profile)
    later = smallest + int(share * (most - smallest))
    forecasts: list[int] = []

    def change(index: int, room: Room) -> None:
        if index == STEPS:
            assert room.planned is not None
            forecasts.append(room.planned.forecast.peak_bytes)
            room.set_budget(later)

    outcome, room = train(name, smallest, profile, STEPS + LATER_STEPS, change, strategy=STRATEGY)
    assert outcome.differences(train(name, None, profile, STEPS + LATER_STEPS)[0]) == []

    assert room is not None and room.planned is not None
    records = room.journal().steps
    modes = [record.mode for record in records]
    settled = modes.index(Mode.PLANNED)
    assert settled <= 3 and set(modes[:settled]) == {Mode.CAPTURE} and set(modes[settled:]) == {Mode.PLANNED}, [
        (str(record.mode), record.note) for record in records
    ]
    peaks = [record.peak_bytes or 0 for record in records]
    check_peaks(peaks[settled:STEPS], forecasts[0], smallest)
    assert max(peaks[:settled]) <= smallest
    assert peaks[STEPS] <= later  # state is still where the former plan has left it
    check_peaks(peaks[STEPS + 1 :], room.planned.forecast.peak_bytes, later)
    assert all(record.offloaded_bytes or record.recomputed for record in records[settled:])


def check_peaks(measured: Sequence[int], forecast: int, budget: int) -> None:
    assert max(measured) <= budget, f"measured {measured}, budget {budget}, forecast {forecast}"
    assert forecast <= budget
    assert min(measured) > 0.99 * forecast and max(measured) < 1.01 * forecast, (
        f"measured {[round(peak / forecast, 4) for peak in measured]} of the forecast of {forecast}"
    )
