"""The search behind `auto`: it is deterministic on any number of cores, survives interruption, and respects `moves`."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import Trace
from elbowroom.planner.options import find_strategy
from elbowroom.planner.problem import Problem, plan, pose
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.searching import annealing_runs, choice_search
from elbowroom.planner.searching.annealing import SweepLimits, find_excess, polish, try_all
from elbowroom.planner.searching.choice_search import search_choices
from elbowroom.planner.searching.search_space import find_search_space
from elbowroom.simulator.compiled_loops.segments import CHOICES, KEEP, OFFLOAD
from elbowroom.simulator.compiled_loops.sweep import sweep
from tests.generators import jobs, make_costs, make_link, make_residual_net

TRACE = make_residual_net(6, 1 << 20)
COSTS = make_costs(TRACE, op_seconds=1e-3, link=make_link(per_second=1e9))


def pose_at(trace: Trace, costs: Costs, share: float) -> Problem:
    """Return a problem with a budget at this share of the way from the smallest to the plain peak."""
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    floor_bytes, plain_bytes = problem.floor.peak_bytes, problem.plain.peak_bytes
    return pose(trace, costs, floor_bytes + int(share * (plain_bytes - floor_bytes)), min_offload_bytes=1)


def seconds_of(problem: Problem, **options: object) -> float:
    """Return the step time of the plan found, and assert that it fits."""
    forecast = problem.drafter.replay.run(search_choices(problem, "auto", **options).plan)  # type: ignore[arg-type]
    assert problem.fits(forecast)
    return forecast.step_seconds


def test_the_plan_does_not_depend_on_the_number_of_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, found = pose_at(TRACE, COSTS, 0.2), []
    for cores in (1, 2, 7):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        found.append(search_choices(problem, "auto").plan)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("calls", [1, 5, 20])
def test_an_interrupted_search_returns_the_best_plan_so_far(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    problem, counter = pose_at(TRACE, COSTS, 0.2), itertools.count(1)
    whole = seconds_of(problem)

    def anneal(*arguments: object) -> float:
        if next(counter) == calls:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    real = annealing_runs.anneal
    monkeypatch.setattr(annealing_runs, "anneal", anneal)
    assert seconds_of(problem) >= whole * (1 - 1e-12)
    assert next(counter) > calls


def test_an_immediate_interruption_still_gives_a_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = pose_at(TRACE, COSTS, 0.0)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(choice_search, "solve_fluid", interrupt)
    assert seconds_of(problem) >= problem.plain.step_seconds


@settings(max_examples=20)
@given(job=jobs(), share=some.floats(0, 1))
def test_the_search_is_never_slower_than_the_strategies_it_starts_from(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(*job, share)
    for name in choice_search.ASKED:
        forecast = problem.drafter.replay.run(find_strategy(name)(problem))
        if problem.fits(forecast):
            assert seconds_of(problem) <= forecast.step_seconds


@given(job=jobs())
def test_a_sweep_that_offloads_everything_reaches_the_floor(job: tuple[Trace, Costs]) -> None:
    problem = pose_at(*job, 0.0)
    vectors = ChoiceVectorPlanner(problem)
    choices = np.full(len(vectors.keys), OFFLOAD, dtype=np.int8)
    for slack in (0.0, 0.5, 2.0):
        assert sweep(vectors.columns, choices, problem.budget_bytes, slack, np.inf, vectors.room)
        assert vectors.room.outcome[0].peak_bytes <= problem.floor.peak_bytes


@settings(max_examples=20)
@given(job=jobs(), share=some.floats(0.0, 1.0))
def test_enumeration_finds_the_optimum_and_polish_cannot_improve_it(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_at(*job, share)
    vectors = ChoiceVectorPlanner(problem)
    columns, room = vectors.columns, vectors.room
    space = find_search_space(columns, problem.budget_bytes, room.segments)
    if not 0 < len(space.alike) <= 4:
        return
    terms = SweepLimits(budget_bytes=problem.budget_bytes, host_bytes=1 << 62, slack=0.5)
    least = np.inf
    for each in itertools.product(range(CHOICES), repeat=len(space.alike)):
        choices = np.zeros(len(vectors.keys), dtype=np.int8)
        choices[space.alike] = each
        if space.allowed[space.alike, each].all() and sweep(columns, choices, terms.budget_bytes, 0.5, np.inf, room):
            least = min(least, np.inf if find_excess(terms, room) else float(room.outcome[0].seconds))
    best = np.full(len(vectors.keys), KEEP, dtype=np.int8)
    assert try_all(columns, space, terms, best, room) == least
    if least < np.inf:
        assert polish(columns, space, terms, best, 1000, room) == least


@pytest.mark.parametrize(("moves", "other"), [("offload", Choice.RECOMPUTE), ("recompute", Choice.OFFLOAD)])
def test_moves_excludes_the_other_choice(moves: str, other: Choice) -> None:
    problem = pose_at(TRACE, COSTS, 0.5)
    made = plan(TRACE, COSTS, problem.budget_bytes, strategy=f"auto:moves={moves}", min_offload_bytes=1)
    assert made.decisions
    assert all(decision.choice is not other for decision in made.decisions)
    both = plan(TRACE, COSTS, problem.budget_bytes, min_offload_bytes=1)
    run = problem.drafter.replay.run
    assert run(both).step_seconds <= run(made).step_seconds * 1.001


def test_infeasible_states_a_budget_that_works_with_recomputation_alone() -> None:
    problem = pose_at(TRACE, COSTS, 0.0)
    with pytest.raises(Infeasible) as caught:
        plan(TRACE, COSTS, problem.budget_bytes, strategy="auto:moves=recompute", min_offload_bytes=1)
    needed = caught.value.needed_bytes
    assert needed > problem.budget_bytes
    made = plan(TRACE, COSTS, needed, strategy="auto:moves=recompute", min_offload_bytes=1)
    assert problem.drafter.replay.run(made).peak_bytes <= needed
