"""How large a batch trains within some memory, and which one trains fastest.

    batch       1   2   16   128  ...            97    98
    smallest    |---|----|-----|   interpolated   |     |      <- memory lies between these two
    fits       yes yes  yes    no                yes    no     <- each of them captured and planned

Sizes between batches that were tried only say where to try next; whatever is reported was tried.
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
from elbowroom.planner.problem import plan, pose

LARGEST_BATCH = 1 << 20
"""Nothing larger is tried."""

MOST_TRIALS = 24
"""Batches tried, beyond which none is tried for throughput's sake."""

GROWTH = 8
"""How many times the largest batch that fitted the next one may be, while none is known that does not fit."""

SPACING, PLAIN_SPACING, CURVE_SPACING = 0.05, 0.2, 0.35
"""How near, as shares of the batch itself, the fastest batch has neighbours, and any other that is drawn.

Throughput of the plain step hardly changes where it is highest.
"""

TraceLoader = Callable[[int], tuple[Trace, Costs]]
"""The step with a batch of so many samples, and what it costs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One batch, captured, priced and planned.

    Attributes:
        batch: how many samples.
        smallest_bytes: the smallest memory that works for this batch.
        plain: the step without a plan, whether it fits or not.
        fits_plain: whether it does.
        planned: the step within the memory.
    """

    batch: int
    smallest_bytes: int
    plain: PlanOutcome
    fits_plain: bool
    planned: Attempt

    @property
    def plain_rate(self) -> float:
        """Samples per second without a plan; 0 where that does not fit."""
        return self._rate(self.plain if self.fits_plain else None)

    @property
    def planned_rate(self) -> float:
        """Samples per second with a plan; 0 where there is none."""
        return self._rate(self.planned.outcome)

    def _rate(self, outcome: PlanOutcome | None) -> float:
        if outcome is None:
            return 0.0
        return self.batch / outcome.step_seconds if outcome.step_seconds else math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """What was found. `trials`: by batch."""

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
        """The largest batch that fits without one."""
        return max((each for each in self.trials if each.fits_plain), key=lambda each: each.batch, default=None)

    @property
    def fastest(self) -> Trial | None:
        """The batch of highest throughput with a plan; of equals the smallest."""
        fitting = (each for each in self.trials if each.planned_rate)
        return max(fitting, key=lambda each: (each.planned_rate, -each.batch), default=None)

    @property
    def fastest_plain(self) -> Trial | None:
        """The batch of highest throughput without one; of equals the smallest."""
        fitting = (each for each in self.trials if each.fits_plain)
        return max(fitting, key=lambda each: (each.plain_rate, -each.batch), default=None)


def try_batches(
    load: TraceLoader, memory_bytes: int, *, strategy: str = "auto", host_bytes: int | None = None
) -> Iterator[Trial]:
    """Try batches until the largest that fits is known, with and without a plan, and the fastest closely enough.

    The largest is known when it was tried and the next one was too: it is taken for granted that what does not fit
    does not fit with more samples either. The fastest is the best of those tried, whose neighbours are near.

    Args:
        load: may refuse a single sample with a ValueError, as models with batch norm do; then two are the first.
        memory_bytes: what the step may hold on the device; nothing is taken off it.
        host_bytes: what the tier below may hold; None for any amount.

    Raises:
        Infeasible: not even the smallest batch fits into the device, or into the tier below.
        UnknownMember: there is no such strategy.

    Cost: one capture and one plan a trial; some five for each bound, and at most `MOST_TRIALS` before the last ones.
    """
    search = _Search(load, memory_bytes, strategy, host_bytes)
    yield search.start()
    yield from search.find_largest(lambda each: each.planned.outcome is not None, search.strain)
    yield from search.find_largest(lambda each: each.fits_plain, lambda each: each.plain.peak_bytes)
    yield from search.find_fastest(lambda each: each.planned_rate, SPACING)
    yield from search.find_fastest(lambda each: each.plain_rate, PLAIN_SPACING)
    yield from search.fill_curve()


class _Search:
    """The trials so far, and where to try next."""

    def __init__(self, load: TraceLoader, memory_bytes: int, strategy: str, host_bytes: int | None) -> None:
        self.load, self.memory_bytes, self.strategy, self.host_bytes = load, memory_bytes, strategy, host_bytes
        self.trials: dict[int, Trial] = {}

    def start(self) -> Trial:
        """The smallest batch there is, which must fit."""
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
            plan(trace, costs, self.memory_bytes, strategy=self.strategy, host_bytes=self.host_bytes)  # it says why not
            raise InternalError(f"a batch of {batch} was planned the second time, and not the first")
        return trial

    def judge(self, batch: int, trace: Trace, costs: Costs) -> Trial:
        """Plan one batch and remember it."""
        problem = pose(trace, costs, self.memory_bytes)
        trial = Trial(
            batch=batch,
            smallest_bytes=problem.floor.peak_bytes,
            plain=summarize(problem.plain),
            fits_plain=problem.plain.peak_bytes <= self.memory_bytes,
            planned=attempt(trace, costs, self.memory_bytes, self.strategy, host_bytes=self.host_bytes),
        )
        self.trials[batch] = trial
        return trial

    def strain(self, trial: Trial) -> float:
        """About how many bytes of the device a batch needs; one too large for the host needs more than there are."""
        if trial.planned.outcome is None and self.host_bytes and trial.planned.needed_host_bytes > self.host_bytes:
            return self.memory_bytes * trial.planned.needed_host_bytes / self.host_bytes
        return trial.smallest_bytes if trial.planned.outcome is not None else trial.planned.needed_bytes

    def find_largest(self, fits: Callable[[Trial], bool], size: Callable[[Trial], float]) -> Iterator[Trial]:
        """Try batches until one fits and the next one does not."""
        creeps = 0
        while fitting := [batch for batch, trial in self.trials.items() if fits(trial)]:
            low = max(fitting)
            high = min((batch for batch in self.trials if batch > low), default=LARGEST_BATCH + 1)
            if high == low + 1:
                return
            batch = self.interpolate(low, high, size)
            far = (low + high) // 2 if high in self.trials else min(2 * low, LARGEST_BATCH)
            creeps += min(batch - low, high - batch) < (far - low) / 2
            if creeps > 2:  # two more near steps are what it takes to settle a batch that was guessed right
                batch, creeps = far if high in self.trials else max(batch, far), 0
            yield self.judge(batch, *self.load(batch))

    def interpolate(self, low: int, high: int, size: Callable[[Trial], float]) -> int:
        """Where the memory would be just enough if sizes were on a line; strictly between `low` and `high`."""
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
        """Try batches beside the best one until its neighbours are near."""
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
        """Try batches where those that fit lie far apart, from the largest plain one up."""
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
