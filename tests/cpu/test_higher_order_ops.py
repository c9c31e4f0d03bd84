"""PyTorch's higher-order operators, which take functions, run in a room as without one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch.utils.checkpoint import checkpoint

from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import StateJob, assert_same, fit, list_tensors

WIDTH, ROWS = 32, 128
PLENTY = 1 << 30


@pytest.fixture(autouse=True)
def nothing_stays_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.run(nn.functional.gelu(self.first(x))))


def choose(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def add_up(x: torch.Tensor) -> torch.Tensor:
    return associative_scan(torch.add, x, 0, combine_mode="generic")


def carry(x: torch.Tensor) -> torch.Tensor:
    return scan(lambda carried, row: (carried + row, carried * row), torch.zeros_like(x[0]), x)[1]


def check_strictly(x: torch.Tensor) -> torch.Tensor:
    return x + strict_mode(torch.sin, (x.detach(),))[0]


@torch.compile(backend="aot_eager")
def draw_again(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(functools.partial(nn.functional.dropout, p=0.1), x, use_reentrant=False)


RUNS = {each.__name__: each for each in (choose, add_up, check_strictly, carry)}
RUNS["draw_again"] = draw_again


def make_job(run: Callable[[torch.Tensor], torch.Tensor]) -> StateJob:
    torch.manual_seed(0)
    model = Net(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    def step(index: int) -> torch.Tensor:
        torch.manual_seed(index)
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return StateJob(model, [optimizer], step)


def run(
    make: Callable[[], StateJob], profile: HardwareProfile, budget_bytes: int, mode: str
) -> tuple[dict[str, torch.Tensor], int, int]:
    """Run a job in a room. Return its tensors and losses, the peak, and the bytes that were moved."""
    job = make()
    with fit(job, profile, budget_bytes, mode=mode, always_watch=True) as room:
        losses = []
        for index in range(5):
            with room.step():
                losses.append(job.step(index))
        steps = room.journal().steps
    found = {**list_tensors(job), "losses": torch.stack(losses)}
    return found, max(each.peak_bytes or 0 for each in steps), sum(each.offloaded_bytes for each in steps)


@pytest.mark.parametrize("mode", ["auto", "dynamic"])
@pytest.mark.parametrize("name", RUNS)
def test_higher_order_ops(name: str, mode: str, profile: HardwareProfile) -> None:
    make = functools.partial(make_job, RUNS[name])
    job = make()
    losses = torch.stack([job.step(index) for index in range(5)])
    plain = {**list_tensors(job), "losses": losses}
    found, peak_bytes, _ = run(make, profile, PLENTY, "dynamic")
    assert_same(plain, found)
    budget_bytes = int(0.8 * peak_bytes)
    found, peak_bytes, moved_bytes = run(make, profile, budget_bytes, mode)
    assert_same(plain, found)
    assert peak_bytes <= budget_bytes and moved_bytes > 0
