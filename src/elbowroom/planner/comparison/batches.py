"""Finds the largest batch that trains within some memory, and the fastest.

    batch       1   2   16   128  ...            97    98
    smallest    |---|----|-----|   interpolated   |     |      <- memory lies between these two
    fits       yes yes  yes    no                yes    no     <- each of them captured and planned

Sizes interpolated between trials only suggest the next trial; every reported batch was captured and planned.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from elbowroom.errors import InternalError, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison.strategies_compared import Attempt, PlanOutcome, attempt, summarize
from elbowroom.planner.options import Manages, find_managed
from elbowroom.planner.problem import plan, pose
from elbowroom.planner.slicing.choice import Slices

LARGEST_BATCH = 1 << 20
"""Upper limit on batches tried."""

MOST_TRIALS = 24
"""No further batch is tried for the sake of throughput after this many trials."""

GROWTH = 8
"""Largest ratio of the next batch to the largest that fits, while no batch is known not to fit."""

SPACING = 0.05
"""Distance from the fastest batch to its neighbours, as a share of the batch."""

PLAIN_SPACING = 0.2
"""Distance from the fastest plain batch to its neighbours: throughput hardly changes near its maximum there."""

CURVE_SPACING = 0.35
"""Distance between other batches, as a share of the batch."""

TraceLoader = Callable[[int], tuple[Trace, Costs]]
"""Captures the step with a batch of this many samples, and prices it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch, captured, priced and planned.

    Attributes:
        batch: number of samples.
        smallest_bytes: the smallest device memory that works for this batch.
        plain: the step without a plan, whether it fits or not.
        fits_plain: whether the plain step fits.
        planned: the step within the memory.
    """

    batch: int
    smallest_bytes: int
    plain: PlanOutcome
    fits_plain: bool
    planned: Attempt

    @property
    def plain_rate(self) -> float:
        """Samples per second without a plan; 0 if that does not fit."""
        return self._rate(self.plain if self.fits_plain else None)

    @property
    def planned_rate(self) -> float:
        """Samples per second with a plan; 0 if there is none."""
        return self._rate(self.planned.outcome)

    def _rate(self, outcome: PlanOutcome | None) -> float:
        if outcome is None:
            return 0.0
        return self.batch / outcome.step_seconds if outcome.step_seconds else math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """All trials of one search, by batch."""

    memory_bytes: int
    host_bytes: int | None
    strategy: str
    trials: tuple[Trial, ...]

    @property
    def largest(self) -> Trial | None:
        """The largest batch that fits with a plan."""
        return max((each for each in self.trials if each.planned_rate), key=lambda each: each.batch, default=None)

    @property
    def largest_plain(self) -> Trial | None:
        """The largest batch that fits without a plan."""
        return max((each for each in self.trials if each.fits_plain), key=lambda each: each.batch, default=None)

    @property
    def fastest(self) -> Trial | None:
        """The batch of highest throughput with a plan; the smallest of equals."""
        fitting = (each for each in self.trials if each.planned_rate)
        return max(fitting, key=lambda each: (each.planned_rate, -each.batch), default=None)

    @property
    def fastest_plain(self) -> Trial | None:
        """The batch of highest throughput without a plan; the smallest of equals."""
        fitting = (each for each in self.trials if each.fits_plain)
        return max(fitting, key=lambda each: (each.plain_rate, -each.batch), default=None)


def try_batches(
    load: TraceLoader,
    memory_bytes: int,
    *,
    strategy: str = "auto",
    host_bytes: int | None = None,
    manages: str = Manages.ACTIVATIONS,
    slices: Slices = Slices.EXACT,
    load_grouped: TraceLoader | None = None,
) -> Iterator[Trial]:
    """Try batches until the largest that fits is known, with and without a plan, and the fastest closely enough.

    The largest is known once it and the next batch were tried: if a batch does not fit, larger ones are assumed not to
    fit either. The fastest is the best of the trials, once its neighbours are close.

    Args:
        load: may reject a single sample with a ValueError, as models with batch norm do; then two samples are the first
            batch.
        memory_bytes: device memory for the step; nothing is subtracted from it.
        host_bytes: capacity of the lower tier; None if unlimited.
        manages: storages that may move (`problem.plan`).
        slices: ops that may run in slices (`problem.plan`).
        load_grouped: loads the step as it runs with a plan, if that differs: optimizers that update a few parameters
            at a time.

    Raises:
        Infeasible: not even the smallest batch fits into the device, or into the lower tier.
        UnknownMember: there is no such strategy.

    Cost: one capture and one plan a trial; about five for each bound, and at most `MOST_TRIALS` before the last ones.
    """
    search = _Search(load, load_grouped, memory_bytes, strategy, host_bytes, manages, slices)
    yield search.start()
    yield from search.find_largest(lambda each: each.planned.outcome is not None, search.estimate_bytes)
    yield from search.find_largest(lambda each: each.fits_plain, lambda each: each.plain.peak_bytes)
    yield from search.find_fastest(lambda each: each.planned_rate, SPACING)
    yield from search.find_fastest(lambda each: each.plain_rate, PLAIN_SPACING)
    yield from search.fill_curve()


class _Search:
    """The trials so far; chooses the next batch."""

    def __init__(
        self,
        load: TraceLoader,
        load_grouped: TraceLoader | None,
        memory_bytes: int,
        strategy: str,
        host_bytes: int | None,
        manages: str,
        slices: Slices,
    ) -> None:
        self.load = load
        self.load_grouped = load_grouped
        self.manages = manages
        self.memory_bytes = memory_bytes
        self.strategy = strategy
        self.host_bytes = host_bytes
        self.slices = slices
        self.trials: dict[int, Trial] = {}

    def start(self) -> Trial:
        """Try the smallest possible batch, which must fit."""
        batch = 1
        try:
            trace, costs = self.load(batch)
        except UsageError:
            raise
        except ValueError:
            batch = 2
            trace, costs = self.load(batch)
        trial = self.judge(batch, trace, costs)
        if trial.planned.outcome is None:
            if self.load_grouped is not None:
                trace, costs = self.load_grouped(batch)
            plan(
                trace, costs, self.memory_bytes, strategy=self.strategy, host_bytes=self.host_bytes,
                manages=self.manages, slices=self.slices,
            )  # fmt: skip  # raises
            raise InternalError(f"planning a batch of {batch} failed the first time and succeeded the second time")
        return trial

    def judge(self, batch: int, trace: Trace, costs: Costs) -> Trial:
        """Plan one batch and record the trial."""
        managed = find_managed(self.strategy, self.manages)
        problem = pose(trace, costs, self.memory_bytes, manages=managed)
        plain = problem.plain
        if self.load_grouped is not None:
            trace, costs = self.load_grouped(batch)
            problem = pose(trace, costs, self.memory_bytes, manages=managed)
        planned = attempt(
            trace, costs, self.memory_bytes, self.strategy, host_bytes=self.host_bytes, manages=self.manages,
            slices=self.slices,
        )  # fmt: skip
        floor_bytes = problem.floor.peak_bytes
        trial = Trial(
            batch=batch,
            smallest_bytes=floor_bytes if planned.outcome is None else min(floor_bytes, self.memory_bytes),
            plain=summarize(plain),
            fits_plain=plain.peak_bytes <= self.memory_bytes,
            planned=planned,
        )
        self.trials[batch] = trial
        return trial

    def estimate_bytes(self, trial: Trial) -> float:
        """Estimate the device bytes that a batch needs; more than `memory_bytes` if it exceeds the host."""
        if trial.planned.outcome is None and self.host_bytes and trial.planned.needed_host_bytes > self.host_bytes:
            return self.memory_bytes * trial.planned.needed_host_bytes / self.host_bytes
        return trial.smallest_bytes if trial.planned.outcome is not None else trial.planned.needed_bytes

    def find_largest(self, fits: Callable[[Trial], bool], size: Callable[[Trial], float]) -> Iterator[Trial]:
        """Try batches until one fits and the next one does not."""
        small_steps = 0
        while fitting := [batch for batch, trial in self.trials.items() if fits(trial)]:
            low = max(fitting)
            high = min((batch for batch in self.trials if batch > low), default=LARGEST_BATCH + 1)
            if high == low + 1:
                return
            batch = self.interpolate(low, high, size)
            bisected = (low + high) // 2 if high in self.trials else min(2 * low, LARGEST_BATCH)
            small_steps += min(batch - low, high - batch) < (bisected - low) / 2
            if small_steps > 2:  # a correct guess is confirmed within two small steps, so bisect from here on
                batch, small_steps = bisected if high in self.trials else max(batch, bisected), 0
            yield self.judge(batch, *self.load(batch))

    def interpolate(self, low: int, high: int, size: Callable[[Trial], float]) -> int:
        """Return the batch that would just fill the memory if sizes were linear, strictly between `low` and `high`."""
        known = sorted(batch for batch in self.trials if batch <= high)[-2:]
        if len(known) < 2:
            return min(2 * low, LARGEST_BATCH)
        first, second = known
        begin = size(self.trials[first])
        slope = (size(self.trials[second]) - begin) / (second - first)
        room = (self.memory_bytes - begin) / slope if slope > 0 else math.inf
        most = high - 1 if high in self.trials else min(GROWTH * low, LARGEST_BATCH)
        return max(low + 1, int(min(first + room, most)))

    def find_fastest(self, rate: Callable[[Trial], float], spacing: float) -> Iterator[Trial]:
        """Try batches next to the best one until its neighbours are close."""
        while len(self.trials) < MOST_TRIALS:
            running = [batch for batch, trial in self.trials.items() if rate(trial)]
            best = max(running, key=lambda batch: (rate(self.trials[batch]), -batch), default=0)
            sides = [(high - low, low) for low, high in _pairs(running) if best in (low, high)]
            width, low = max(sides, default=(0, best))
            if width <= max(1, spacing * best):
                return
            batch = low + width // 2
            yield self.judge(batch, *self.load(batch))

    def fill_curve(self) -> Iterator[Trial]:
        """Try batches where those that fit are far apart, from the largest plain one up."""
        while len(self.trials) < MOST_TRIALS:
            begin = max((batch for batch, trial in self.trials.items() if trial.fits_plain), default=0)
            running = [batch for batch, trial in self.trials.items() if trial.planned_rate and batch >= begin]
            width, low = max(((high / low - 1, low) for low, high in _pairs(running)), default=(0.0, 0))
            if width <= CURVE_SPACING or low * width < 2:
                return
            batch = low + int(low * width) // 2
            yield self.judge(batch, *self.load(batch))


def _pairs(batches: list[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(sorted(batches))
