"""Walks through the choices, side by side on all cores.

How they are spread over cores changes nothing about where they end: each has its own numbers, its own room, and its
own best until all are over.
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
"""Side by side."""

PIECES = 8
"""Of every walk, between which an interruption is noticed."""


@dataclasses.dataclass(slots=True)
class BestChoices:
    """The best choices so far, and the seconds of their step with a slack; infinite if they do not fit."""

    choices: Array
    seconds: float
    slack: float


@dataclasses.dataclass(frozen=True, slots=True)
class AnnealingRun:
    """Where a walk starts, and how it goes on.

    Attributes:
        hot, cold: seconds: temperatures at the beginning and at the end.
        turns: 0: only look at the start.
        price: seconds for every byte that is too much, at the beginning.
        slack: as for `sweep`.
        again: which time walks go on from here; each has other numbers.
    """

    start: Array
    hot: float
    cold: float
    turns: int
    price: float
    slack: float
    again: int = 0


def anneal_all(
    columns: Columns, space: SearchSpace, terms: SweepLimits, walks: Sequence[AnnealingRun], best: BestChoices,
    beside: Sequence[Callable[[], Plan | None]] = (),
) -> list[Plan]:  # fmt: skip
    """Go all walks, and set `best` to the best of them and itself.

    Args:
        beside: what else is to be done meanwhile, by the interpreter, which walks leave idle.

    Returns:
        The plans that `beside` made.

    Raises:
        KeyboardInterrupt: after what was found until then is in `best`.
    """
    found = [BestChoices(best.choices, np.inf, walk.slack) for walk in walks]
    stop = threading.Event()

    def go(seed: int) -> None:
        walk = walks[seed]
        found[seed] = BestChoices(best.choices.copy(), np.inf, walk.slack)
        _go(columns, space, terms._replace(slack=walk.slack), walk, seed, found[seed], stop)

    try:
        tasks: list[Callable[[], Plan | None]] = [*beside]
        tasks += [functools.partial(go, seed) for seed in range(len(walks))]
        done = run_all(tasks, stop.set)
    finally:
        fastest = min(found, key=lambda each: each.seconds, default=best)
        if fastest.seconds < best.seconds:
            best.choices, best.seconds, best.slack = fastest.choices, fastest.seconds, fastest.slack
    return [each for each in done if each is not None]


def _go(
    columns: Columns,
    space: SearchSpace,
    terms: SweepLimits,
    walk: AnnealingRun,
    seed: int,
    best: BestChoices,
    stop: threading.Event,
) -> None:
    room, choices, prices = make_sweep(columns), walk.start.copy(), np.asarray([walk.price])
    pieces = PIECES if walk.turns else 1
    cooling = (walk.cold / walk.hot) ** (1 / pieces)
    for piece in range(pieces):
        if stop.is_set():
            return
        heat = walk.hot * cooling**piece
        best.seconds = anneal(
            columns, space, terms, choices, best.choices, heat, heat * cooling, max(1, walk.turns // pieces),
            PIECES * (seed + MOST_RUNS * walk.again) + piece + 1, prices, room,
        )  # fmt: skip
