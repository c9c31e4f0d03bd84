"""Compiles every loop ahead of the steps that need it, by planning small models with all that has loops of its own."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch

from elbowroom.api import capture
from elbowroom.cost.price import price
from elbowroom.hardware.shipped import load_shipped
from elbowroom.ir.buffers import Buffer
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.layout.lay_out import lay_out
from elbowroom.planner.problem import plan, pose
from elbowroom.progress import Advance, drawing_on

MANY, FEW = 12, 4
"""Layers: the choices for many are searched, those for few are all tried."""

WIDTH, SAMPLES, BUFFERS = 64, 1024, 60


def compile_loops(advance: Advance) -> None:
    """Compile what is not yet on disk, which takes up to a minute. `advance` is told how far it is."""
    small, large = _make_job(FEW), _make_job(MANY)
    stages: dict[str, Callable[[], object]] = {
        "a search through choices": functools.partial(_plan, *large, "auto"),
        "all choices of a small step": functools.partial(_plan, *small, "auto"),
        "the search for the best": functools.partial(_plan, *small, "exact"),
        "the search by particles": functools.partial(_plan, *small, "home_pso"),
        "layouts": functools.partial(lay_out, _make_buffers()),
    }
    for done, (what, work) in enumerate(stages.items()):
        advance(what, done / len(stages))
        with drawing_on(None):
            work()


def _make_job(layers: int) -> tuple[Trace, Costs]:
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())]
    model, inputs = torch.nn.Sequential(*parts), torch.ones(SAMPLES, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    trace = capture(step, model, optimizer)
    return trace, price(trace, load_shipped("p100"))


def _plan(trace: Trace, costs: Costs, strategy: str) -> None:
    problem = pose(trace, costs, 1)
    plan(trace, costs, (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2, strategy=strategy)


def _make_buffers() -> tuple[Buffer, ...]:
    """Buffers for which no order is as good as a search."""
    draw = random.Random(1)
    begins = [draw.randrange(BUFFERS) for _ in range(BUFFERS)]
    return tuple(
        Buffer(id=index, lower=begin, upper=begin + draw.randint(1, BUFFERS // 3), nbytes=draw.randint(1, 1 << 20))
        for index, begin in enumerate(begins)
    )
