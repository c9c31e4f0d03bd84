"""AutoSwap: offload the blocks with the highest scores among those idle at the memory peak.

1. Candidates: gaps of blocks of at least 1 MiB that span the peak.
2. Choose by score, until memory use would be under the limit:
   doa      spare seconds after both copies
   aoa      doa times bytes
   wdoa     excess of memory use over the limit, summed over the gap
   swdoa    wdoa with the memory use left after each choice
   vote     the sum of the ranks under the first three
   tuned    all of these normalised and weighted; Bayesian optimisation of the forecast finds the weights
3. Schedule the copies: out one after the other, back as late as possible.

With `mode=zero_overhead` the step never waits. Blocks are then free only once their copies are done, so memory use may
exceed the limit; other limits are then tried, and the lowest peak reached is what such a plan needs. With
`mode=stick_to_limit` the step waits for copies, and reloads are delayed, wherever memory use would exceed the limit.

Source: J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient memory management for GPU-based deep learning
systems", 2019, and the authors' code. Inferred: the formula of swdoa, and which optimiser tunes the weights (here a
tree-structured Parzen estimator). Ours: the published search considers only the highest peak, as `peaks=first` does,
and fails if there is a second; `peaks=all` goes on with the next. Memory is counted over all blocks, at saves and needs
rather than at every access, so the margins of a few accesses that the code leaves after each are not needed.

Cost: for each choice, linear in ticks and candidates; some tens of such searches with `zero_overhead` or `tuned`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import numpy as np

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Plan
from elbowroom.planner.heuristics.scores import GapCandidates, Scorer, choose, make_scorer, weigh
from elbowroom.planner.heuristics.tuning import minimise
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.assembly import assemble
from elbowroom.planner.schedule.draft import Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import CopyTimetable, Times

LIMITS_SWEPT = 24
"""Limits tried with `zero_overhead`, between the lowest possible peak and the plain one."""

TRIALS = 40
"""Weight vectors tried."""

UNFIT = 1e9
"""Value in seconds of a plan that does not fit, per multiple of the budget that its peak is."""

ScorerFor = Callable[[int], Scorer]
"""Returns the scorer for a limit."""


def make_plan(
    problem: Problem,
    *,
    score: Literal["swdoa", "doa", "aoa", "wdoa", "vote", "tuned"] = "swdoa",
    mode: Literal["stick_to_limit", "zero_overhead"] = "stick_to_limit",
    peaks: Literal["all", "first"] = "all",
) -> Plan:
    """Return the plan of the blocks chosen; if it does not fit, the plan with the lowest peak that this mode reaches.

    Args:
        score: the score by which blocks are chosen, as above.
        mode: whether the step may wait for copies.
        peaks: whether the search goes on with the next peak once one is under the limit.

    Raises:
        UsageError: `tuned` needs a package that is not installed.
    """
    swaps = _Swaps(problem, mode, first_only=peaks == "first")
    scorer_for: ScorerFor = swaps.weigh_evenly
    if score == "tuned":
        tuned = swaps.tune()
        if tuned is not None:
            return tuned
    else:
        scorer_for = functools.partial(swaps.score, name=score)
    plan, forecast = swaps.attempt(scorer_for, problem.budget_bytes)
    return plan if problem.fits(forecast) else swaps.find_lowest(scorer_for)


class _Swaps:
    """Choices and their times, for any limit."""

    def __init__(self, problem: Problem, mode: str, *, first_only: bool) -> None:
        self._problem, self._waits = problem, mode == "stick_to_limit"
        self._load = MemoryCurve(problem.drafter, problem.plain.live_bytes)
        self._plain = self._load.live
        self._candidates = GapCandidates(problem.drafter, self._load, problem.plain.peak_tick if first_only else None)
        self._timetable = CopyTimetable(problem.drafter)

    def score(self, limit_bytes: int, name: str) -> Scorer:
        """Return the scorer of a published score."""
        return make_scorer(self._candidates, self._plain, limit_bytes, name)

    def weigh_evenly(self, limit_bytes: int) -> Scorer:
        """Return the scorer with equal weights."""
        return weigh(self._candidates, limit_bytes, (1.0, 1.0, 1.0, 1.0))

    def attempt(self, scorer_for: ScorerFor, limit_bytes: int) -> tuple[Plan, Forecast]:
        """Return the plan of the blocks chosen for a limit; with `zero_overhead` its peak may exceed the limit."""
        chosen = self._choose(scorer_for, limit_bytes)
        if self._waits:
            wanted = {key: self._problem.drafter.gaps[key].closes for key in chosen}
            return self._finish(self._timetable.hold_under(self._load.copy(), wanted, limit_bytes))
        return self._finish(self._timetable.lay_out(chosen))

    def find_lowest(self, scorer_for: ScorerFor) -> Plan:
        """Return a plan found under other limits that fits, or the one with the lowest peak, whatever the budget."""
        if self._waits:
            gaps = self._problem.drafter.gaps
            chosen = self._choose(scorer_for, -1)
            return self._finish({key: Times(gaps[key].opens, gaps[key].closes) for key in chosen})[0]
        low, high = self._problem.floor.peak_bytes, self._problem.plain.peak_bytes
        limits = np.linspace(high, low, LIMITS_SWEPT).astype(np.int64).tolist()
        found = [self.attempt(scorer_for, limit_bytes) for limit_bytes in limits]
        fitting = [plan for plan, forecast in found if self._problem.fits(forecast)]
        return fitting[0] if fitting else min(found, key=lambda each: each[1].peak_bytes)[0]

    def tune(self) -> Plan | None:
        """Return the fastest plan that fits among the weights tried; None if none fits."""
        budget_bytes = self._problem.budget_bytes
        best: tuple[float, Plan] | None = None

        def evaluate(weights: tuple[float, ...]) -> float:
            nonlocal best
            plan, forecast = self.attempt(
                lambda limit_bytes: weigh(self._candidates, limit_bytes, weights), budget_bytes
            )
            if not self._problem.fits(forecast):
                return UNFIT * forecast.peak_bytes / max(budget_bytes, 1)
            if best is None or forecast.step_seconds < best[0]:
                best = forecast.step_seconds, plan
            return forecast.step_seconds

        minimise(evaluate, count=4, trials=TRIALS)
        return None if best is None else best[1]

    def _choose(self, scorer_for: ScorerFor, limit_bytes: int) -> list[Key]:
        most_bytes = self._problem.host_bytes
        return choose(self._candidates, self._plain, limit_bytes, scorer_for(limit_bytes), most_bytes=most_bytes)

    def _finish(self, times: dict[Key, Times]) -> tuple[Plan, Forecast]:
        drafter = self._problem.drafter
        plan = assemble(drafter, "autoswap", self._problem.budget_bytes, offloads=times)
        return plan, drafter.replay.run(plan)
