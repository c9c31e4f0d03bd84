"""Jobs whose parameters, gradients and optimizer state do not fit into their budget, run with and without one."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import elbowroom
from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.room import Room
from elbowroom.runtime.state_pager import StatePager

STEPS = 5
WIDTH, LAYERS, ROWS = 64, 10, 8
MIN_BYTES = 256
PARAMETER_BYTES = LAYERS * (WIDTH + 1) * WIDTH * 4

BUDGET = 5 * PARAMETER_BYTES // 4
"""With Adam, the parameters, gradients and optimizer state take four times the bytes of the parameters."""


def make_model(layers: int = LAYERS, *extra: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *(each() for each in extra)) for _ in range(layers)]
    return nn.Sequential(*blocks)


def make_batch(index: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


@dataclasses.dataclass
class StateJob:
    """A model with its optimizers and its step.

    Attributes:
        others: tensors that training changes as well, by what they are.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    step: Callable[[int], Any]
    others: Callable[[], dict[str, torch.Tensor]] = dict


def make_job(make_optimizer: Callable[[Any], Optimizer], model: nn.Module | None = None) -> StateJob:
    """The plainest loop."""
    model = make_model() if model is None else model
    optimizer = make_optimizer([each for each in model.parameters() if each.requires_grad])

    def step(index: int) -> torch.Tensor:
        loss = model(make_batch(index)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def adamw(parameters: Any, **options: bool) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def list_tensors(job: StateJob) -> dict[str, torch.Tensor]:
    """Copies of all that training has changed."""
    found = {name: each.detach().clone() for name, each in job.model.state_dict(keep_vars=True).items()}
    for name, parameter in job.model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.detach().clone()
    for index, optimizer in enumerate(job.optimizers):
        for position, state in enumerate(optimizer.state.values()):
            for key, each in state.items():
                if isinstance(each, torch.Tensor):
                    found[f"optimizer {index}, parameter {position}, {key}"] = each.detach().clone()
    return found | {what: each.detach().clone() for what, each in job.others().items()}


def get_pager(room: Room) -> StatePager:
    assert room._pager is not None
    return room._pager


class OutsideMeter:
    """Meters allocations by a meter that is not ours: those since it was made, and before `stop`."""

    def __init__(self) -> None:
        self._meter, self._begin = ProfilerMeter(), time.time()
        self._meter.start()

    def count_seconds(self) -> float:
        return time.time() - self._begin

    def stop(self) -> None:
        self._meter.stop()

    def find_peak(self, seconds: float) -> int:
        """Return the most bytes at a time after so many seconds."""
        times, live = self._meter.timeline()
        return max(nbytes for second, nbytes in zip(times, live, strict=True) if second >= seconds)


def fit(job: StateJob, profile: HardwareProfile, budget_bytes: int = BUDGET, **options: Any) -> Room:
    options = {"mode": "dynamic", "min_offload_bytes": MIN_BYTES, "profile": profile} | options
    return elbowroom.fit(job.model, job.optimizers, budget_bytes, **options)


def run_plain(make: Callable[[], StateJob], steps: int = STEPS) -> dict[str, torch.Tensor]:
    job = make()
    losses = [job.step(index) for index in range(steps)]
    return list_tensors(job) | {f"loss {index}": loss for index, loss in enumerate(losses) if loss is not None}


def run_within(
    make: Callable[[], StateJob],
    profile: HardwareProfile,
    budget_bytes: int = BUDGET,
    steps: int = STEPS,
    elsewhere_bytes: int = 0,
    *,
    is_metered: bool = True,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Run a job within a budget, which all steps have to hold and some need state to leave for.

    Args:
        elsewhere_bytes: of what the loop holds that is none of the job's state.
        is_metered: by a profiler, for which PyTorch calls callbacks that it would skip otherwise.
    """
    meter = OutsideMeter() if is_metered else None
    try:
        job = make()
        losses = []
        with fit(job, profile, budget_bytes, **options) as room:
            for index in range(steps):
                with room.step():
                    losses.append(job.step(index))
                if index == 0 and meter is not None:
                    begin = meter.count_seconds()
            assert max(record.peak_bytes or 0 for record in room.journal().steps) <= budget_bytes
            if meter is not None:
                meter.stop()
                assert 0 < meter.find_peak(begin) <= budget_bytes + elsewhere_bytes
            pager = get_pager(room)
            assert pager.storages.offloaded_bytes > 0 and pager.storages.reloaded_bytes > 0, "nothing had to leave"
            found = list_tensors(job)
    finally:
        if meter is not None:
            meter.stop()
    found |= {f"loss {index}": loss for index, loss in enumerate(losses) if loss is not None}
    assert_same(found, found | list_tensors(job))  # detached, all is as it was
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [what for what in one if one[what].dtype != other[what].dtype or not torch.equal(one[what], other[what])]


def assert_trains_the_same(
    make: Callable[[], StateJob], profile: HardwareProfile, budget_bytes: int = BUDGET, **options: Any
) -> None:
    assert_same(run_plain(make), run_within(make, profile, budget_bytes, **options))


EVERYTHING = 1 << 40


@dataclasses.dataclass
class Away:
    """A job after two steps, and its plain twin; all of its state that may leave has left.

    Attributes:
        other: a job of the same shapes.
        parameter, twin: a weight that is away, and the same of the plain job.
    """

    job: StateJob
    plain: StateJob
    other: StateJob
    room: Room

    @property
    def parameter(self) -> nn.Parameter:
        return find_weight(self.job)

    @property
    def twin(self) -> nn.Parameter:
        return find_weight(self.plain)

    def empty(self) -> None:
        get_pager(self.room).make_room(EVERYTHING)
        assert get_pager(self.room).is_away(self.parameter.untyped_storage())

    def train_on(self) -> None:
        """Go on with both, which have to stay the same."""
        for index in range(2, 4):
            with self.room.step():
                self.job.step(index)
        self.room.detach()
        for index in range(2, 4):
            self.plain.step(index)  # its memory would count for the room
        assert_same(list_tensors(self.job), list_tensors(self.plain))


def find_weight(job: StateJob) -> nn.Parameter:
    return list(job.model.parameters())[4]


@contextlib.contextmanager
def sending_away(profile: HardwareProfile) -> Iterator[Away]:
    """Run a job for two steps, and have its state leave."""
    job, plain, other = make_job(adamw), make_job(adamw), make_job(adamw)
    for index in range(2):
        plain.step(index)  # before there is a room, for which it would count
        other.step(index + 9)
    with fit(job, profile) as room:
        for index in range(2):
            with room.step():
                job.step(index)
        made = Away(job, plain, other, room)
        made.empty()
        yield made
