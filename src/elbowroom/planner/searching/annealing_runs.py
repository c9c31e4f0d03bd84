"""Runs simulated annealing from several starts in parallel.

The result does not depend on the number of cores: each run has its own random numbers, buffers and best choices until
all have ended.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.planner.searching.annealing import SearchSpace, SweepLimits, anneal
from elbowroom.planner.searching.cores import run_all
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.transit import make_sweep

MOST_RUNS = 100
"""Most runs in parallel."""

PIECES = 8
"""Parts of each run; an interruption is noticed between them."""


@dataclasses.dataclass(slots=True)
class BestChoices:
    """The best choices so far, and the seconds of their step under a slack; infinite if they do not fit."""

    choices: Array
    seconds: float
    slack: float


@dataclasses.dataclass(frozen=True, slots=True)
class AnnealingRun:
    """One start of simulated annealing, and its schedule.

    Attributes:
        start: the initial choices.
        hot, cold: initial and final temperature, in seconds.
        turns: number of turns; 0 only evaluates the start.
        price: initial penalty, in seconds per excess byte.
        slack: as for `sweep`.
        restart: number of the restart; each has other random numbers.
    """

    start: Array
    hot: float
    cold: float
    turns: int
    price: float
    slack: float
    restart: int = 0


def anneal_all(
    columns: Columns, space: SearchSpace, limits: SweepLimits, runs: Sequence[AnnealingRun], best: BestChoices,
    beside: Sequence[Callable[[], Plan | None]] = (),
) -> list[Plan]:  # fmt: skip
    """Anneal all runs, and set `best` to the best of their results and itself.

    Args:
        beside: other tasks for the Python interpreter, which compiled runs leave idle.

    Returns:
        The plans that `beside` returned.

    Raises:
        KeyboardInterrupt: `best` then holds what was found until the interruption.
    """
    found = [BestChoices(best.choices, np.inf, run.slack) for run in runs]
    stop = threading.Event()

    def anneal_one(seed: int) -> None:
        run = runs[seed]
        found[seed] = BestChoices(best.choices.copy(), np.inf, run.slack)
        _anneal(columns, space, limits._replace(slack=run.slack), run, seed, found[seed], stop)

    try:
        tasks: list[Callable[[], Plan | None]] = [*beside]
        tasks += [functools.partial(anneal_one, seed) for seed in range(len(runs))]
        done = run_all(tasks, stop.set)
    finally:
        fastest = min(found, key=lambda each: each.seconds, default=best)
        if fastest.seconds < best.seconds:
            best.choices = fastest.choices
            best.seconds = fastest.seconds
            best.slack = fastest.slack
    return [each for each in done if each is not None]


def _anneal(
    columns: Columns,
    space: SearchSpace,
    limits: SweepLimits,
    run: AnnealingRun,
    seed: int,
    best: BestChoices,
    stop: threading.Event,
) -> None:
    room = make_sweep(columns)
    choices = run.start.copy()
    prices = np.asarray([run.price])
    pieces = PIECES if run.turns else 1
    cooling = (run.cold / run.hot) ** (1 / pieces)
    for piece in range(pieces):
        if stop.is_set():
            return
        heat = run.hot * cooling**piece
        best.seconds = anneal(
            columns, space, limits, choices, best.choices, heat, heat * cooling, max(1, run.turns // pieces),
            PIECES * (seed + MOST_RUNS * run.restart) + piece + 1, prices, room,
        )  # fmt: skip
