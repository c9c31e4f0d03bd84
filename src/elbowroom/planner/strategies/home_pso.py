"""HOME: a joint choice of keep, offload or recompute for every group of storages, by particle swarm optimisation.

    particle   a score for each of the three choices of each group; the highest one counts
    fitness    seconds of the simulated step, and a penalty for bytes over the budget
    velocity   inertia, attraction to the particle's own best, attraction to the swarm's best

The search space is reduced: only gaps that span a tick over the budget are decided on, the gaps of one storage
together, and a choice that a group does not have is never drawn.

Source: S. He, P. Chen, S. Chen, Z. Li, S. Yang, W. Chen, L. Shou, "HOME: A holistic GPU memory management framework for
deep learning", IEEE Transactions on Computers 72(3), 2023: the three choices for every tensor, the swarm, the
whole-step cost model as its fitness, and that the search space is much reduced. Only the abstract was available.
Inferred: how the space is reduced, the coefficients, the seeds and the repair. Our simulator's sweep decides when each
move happens; the authors' evaluator may differ.

Cost: `particles` times `generations` sweeps.
"""

from __future__ import annotations

import numpy as np

from elbowroom.ir.plan import Plan
from elbowroom.planner.problem import Problem, lowest_draft
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.searching.annealing import SearchSpace
from elbowroom.planner.searching.search_space import find_search_space
from elbowroom.simulator.compiled_loops.columns import Array
from elbowroom.simulator.compiled_loops.segments import KEEP, OFFLOAD, RECOMPUTE
from elbowroom.simulator.compiled_loops.sweep import sweep_all
from elbowroom.simulator.compiled_loops.transit import make_outcomes

INERTIA = (0.9, 0.4)
PULL = 1.7
FASTEST = 1.0
PENALTY = 5.0
"""Plain steps added for exceeding the budget by all of it."""

SLACK = 0.5
MOST_REPAIRS = 400


def make_plan(problem: Problem, *, particles: int = 64, generations: int = 150, seed: int = 0) -> Plan:
    """Return the best plan that the swarm found; the one with the lowest possible peak if none fits.

    Args:
        particles: vectors of choices in each generation.
        generations: number of moves of the swarm.
        seed: of the random numbers.
    """
    if problem.fits(problem.plain):
        plan = problem.drafter.finish({}, "home_pso", problem.budget_bytes)
        assert plan is not None  # it drops nothing
        return plan
    if problem.floor.peak_bytes <= problem.budget_bytes:
        swarm = _Swarm(problem, np.random.default_rng(seed))
        choices = swarm.repair(swarm.search(particles, generations))
        plan = None if choices is None else swarm.vectors.make_plan(choices, "home_pso", SLACK)
        if plan is not None and problem.fits(problem.drafter.replay.run(plan)):
            return plan
    lowest = problem.drafter.finish(lowest_draft(problem.drafter), "home_pso", problem.budget_bytes)
    assert lowest is not None
    return lowest


class _Swarm:
    def __init__(self, problem: Problem, random: np.random.Generator) -> None:
        self.vectors = ChoiceVectorPlanner(problem)
        self._problem, self._random = problem, random
        columns = self.vectors.columns
        self._space: SearchSpace = find_search_space(columns, problem.budget_bytes, self.vectors.room.segments)
        storages, group_of = np.unique(columns.gaps["storage"][self._space.alike], return_inverse=True)
        self._group_of = group_of
        self._allowed = np.ones((len(storages), 3), dtype=np.bool_)
        np.logical_and.at(self._allowed, group_of, self._space.allowed[self._space.alike, : RECOMPUTE + 1])

    def search(self, particles: int, generations: int) -> Array:
        """Return the best choices of the swarm."""
        shape = (particles, len(self._allowed), 3)
        scores = self._random.normal(size=shape)
        for row, choice in enumerate((KEEP, OFFLOAD, RECOMPUTE)[:particles]):
            scores[row, :, choice] += 3.0  # seeds: one choice for all groups that have it
        scores = np.where(self._allowed, scores, -np.inf)
        speed = np.zeros(shape)
        best, fitness = scores.copy(), self._judge(self._decode(scores))
        for generation in range(generations):
            leader = best[int(np.argmin(fitness))]
            inertia = INERTIA[0] + (INERTIA[1] - INERTIA[0]) * generation / max(1, generations - 1)
            own, common = self._random.random(shape), self._random.random(shape)
            with np.errstate(invalid="ignore"):  # choices that are not allowed stay at minus infinity
                pull = PULL * own * (best - scores) + PULL * common * (leader - scores)
            speed = np.clip(inertia * speed + np.where(self._allowed, pull, 0.0), -FASTEST, FASTEST)
            scores = scores + speed
            now = self._judge(self._decode(scores))
            better = now < fitness
            best[better], fitness[better] = scores[better], now[better]
        found: Array = self._decode(best[[int(np.argmin(fitness))]])[0]
        return found

    def repair(self, choices: Array) -> Array | None:
        """Evict at the peak what costs least time per byte, until the plan fits; return None if nothing helps."""
        columns, choices = self.vectors.columns, choices.copy()
        begins = columns.events["after"][columns.gaps["open_event"]]
        ends = columns.events["at"][columns.gaps["close_event"]]
        for _ in range(MOST_REPAIRS):
            outcome = self._sweep(choices[None])[0]
            excess = self._excess(outcome)
            if not np.isfinite(outcome.seconds):
                return None
            if excess == 0:
                return choices
            at_peak = (begins <= outcome.peak_slot) & (ends > outcome.peak_slot) & (choices == KEEP)
            tried = []
            for gap in np.flatnonzero(at_peak & (self._space.place >= 0)):
                for choice in np.flatnonzero(self._space.allowed[gap, : RECOMPUTE + 1])[1:]:
                    other = choices.copy()
                    other[gap] = choice
                    tried.append(other)
            if not tried:
                return None
            found = self._sweep(np.asarray(tried))
            over = np.asarray([self._excess(each) for each in found])
            with np.errstate(divide="ignore"):
                worth = (excess - over) / np.maximum(found["seconds"] - outcome.seconds, 1e-12)
            if not (worth > 0).any():
                return None
            choices = tried[int(np.argmax(worth))]
        return None

    def _decode(self, scores: Array) -> Array:
        """Return the choice of every gap: the highest score of its group."""
        choices = np.zeros((len(scores), len(self.vectors.columns.gaps)), dtype=np.int8)
        choices[:, self._space.alike] = np.argmax(scores, axis=2)[:, self._group_of]
        return choices

    def _sweep(self, batch: Array) -> Array:
        outcomes = make_outcomes(len(batch))
        sweep_all(self.vectors.columns, batch, self._problem.budget_bytes, SLACK, self.vectors.room, outcomes)
        return outcomes

    def _judge(self, batch: Array) -> Array:
        outcomes = self._sweep(batch)
        over = np.asarray([self._excess(each) for each in outcomes])
        penalty = PENALTY * self._problem.plain.step_seconds / max(1, self._problem.budget_bytes)
        fitness: Array = outcomes["seconds"] + penalty * over
        return fitness

    def _excess(self, outcome: Array) -> int:
        host_bytes = self._problem.host_bytes
        below = 0 if host_bytes is None else max(0, int(outcome["lower_bytes"]) - host_bytes)
        return max(0, int(outcome["peak_bytes"]) - self._problem.budget_bytes) + below
