"""The compiled sweep is the plain simulator's twin: same peak, same seconds, for any choices and any budget."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import Presence, Trace
from elbowroom.planner.problem import Problem, pose
from elbowroom.planner.schedule.choice_vectors import ChoiceVectorPlanner
from elbowroom.planner.schedule.draft import Option
from elbowroom.simulator.compiled_loops.columns import Array
from elbowroom.simulator.compiled_loops.segments import CHOICES, KEEP, OFFLOAD, RECOMPUTE
from elbowroom.simulator.compiled_loops.sweep import sweep
from elbowroom.simulator.compiled_loops.transit import make_sweep
from tests.generators import example, jobs, make_link

pytestmark = pytest.mark.usefixtures("small_hosts")


def draw_choices(data: some.DataObject, count: int) -> Array:
    return np.asarray(
        data.draw(some.lists(some.integers(0, CHOICES - 1), min_size=count, max_size=count)), dtype=np.int8
    )


def judge_sweep(problem: Problem, vectors: ChoiceVectorPlanner, choices: Array, slack: float) -> Forecast | None:
    """Hold a sweep to the plan made of it; None where it cannot be carried out, or the plan moves less than it."""
    if not sweep(vectors.columns, choices, problem.budget_bytes, slack, np.inf, vectors.room):
        return None
    plan = vectors.make_plan(choices, "test", slack)
    check(problem.drafter.replay.trace, plan)
    forecast = problem.drafter.replay.run(plan)
    outcome, moves = vectors.room.outcome[0], vectors.room.segments.moves
    assert outcome.peak_bytes == forecast.peak_bytes
    futile = (moves["choice"] == OFFLOAD) & (moves["release_event"] < 0)
    if futile.any():
        claims = vectors.columns.gaps["claim"]
        serves = np.isin(claims[futile], claims[(moves["choice"] == OFFLOAD) & ~futile])
        # Without copies that come to nothing it may be faster; not if a later gap uses one, or others take its room.
        if problem.drafter.replay.overflow is None and not serves.any():
            assert outcome.seconds >= forecast.step_seconds * (1 - 1e-12)
        return None
    assert outcome.seconds == pytest.approx(forecast.step_seconds, rel=1e-12)
    assert (outcome.lower_bytes, outcome.disk_bytes) == (forecast.lower_tier_bytes, forecast.disk_bytes)
    assert outcome.stall_seconds == pytest.approx(forecast.stall_seconds, rel=1e-9, abs=1e-15)
    return forecast


@given(job=jobs(), data=some.data(), share=some.floats(0.2, 1.1), slack=some.sampled_from([0.0, 1.0]))
def test_a_sweep_is_a_replay(job: tuple[Trace, Costs], data: some.DataObject, share: float, slack: float) -> None:
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1)
    vectors = ChoiceVectorPlanner(problem)
    judge_sweep(problem, vectors, draw_choices(data, len(vectors.keys)), slack)


@some.composite
def gathered_jobs(draw: some.DrawFn) -> tuple[Trace, Costs]:
    """Jobs in which what exists before the step is there at some ticks only."""
    trace, costs = draw(jobs())
    ticks = some.integers(0, trace.end)
    presences = [
        Presence(storage=home.id, begin=min(span), end=max(span))
        for home in trace.storages
        if home.created < 0 and draw(some.booleans())
        for span in draw(some.lists(some.tuples(ticks, ticks), min_size=1, max_size=2))
    ]
    trace = dataclasses.replace(trace, presences=tuple(presences))
    check_trace(trace)
    return trace, dataclasses.replace(costs, trace_digest=digest(trace))


@given(job=gathered_jobs(), data=some.data(), share=some.floats(0.2, 1.1))
def test_a_sweep_reads_contents_while_they_are_there(
    job: tuple[Trace, Costs], data: some.DataObject, share: float
) -> None:
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1)
    vectors = ChoiceVectorPlanner(problem)
    judge_sweep(problem, vectors, draw_choices(data, len(vectors.keys)), 1.0)
    for index, key in enumerate(vectors.keys):  # each gap by itself
        choices = np.where(np.arange(len(vectors.keys)) == index, RECOMPUTE, KEEP).astype(np.int8)
        made = problem.drafter.finish({key: Option(Choice.RECOMPUTE)}, "test", 1)
        assert (made is not None) == bool(
            sweep(vectors.columns, choices, problem.budget_bytes, 1.0, np.inf, vectors.room)
        )


@given(
    job=jobs(disk=True),
    data=some.data(),
    share=some.floats(0.2, 1.1),
    host_share=some.floats(0.0, 1.2),
    slack=some.sampled_from([0.0, 1.0]),
)
def test_a_sweep_is_a_replay_where_copies_go_on_to_a_disk(
    job: tuple[Trace, Costs], data: some.DataObject, share: float, host_share: float, slack: float
) -> None:
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    host_bytes = max(count_least_host_bytes(), int(problem.floor.lower_tier_bytes * host_share))
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1, host_bytes=host_bytes)
    assert problem.host_bytes is None  # it is no limit
    vectors = ChoiceVectorPlanner(problem)
    forecast = judge_sweep(problem, vectors, draw_choices(data, len(vectors.keys)), slack)
    if forecast is not None:
        assert forecast.lower_tier_bytes <= host_bytes


def test_a_sweep_uses_the_disk() -> None:
    """So that the property above is not one of empty disks."""
    trace, costs = example()
    costs = dataclasses.replace(costs, link=make_link(), further_links=(make_link(per_second=2e8),))
    free = pose(trace, costs, 10**9, min_offload_bytes=1)
    found = {}
    for host_bytes in (None, free.floor.lower_tier_bytes // 2, 4096):
        problem = pose(trace, costs, free.plain.peak_bytes * 7 // 10, min_offload_bytes=1, host_bytes=host_bytes)
        vectors = ChoiceVectorPlanner(problem)
        gaps = vectors.columns.gaps
        choices = np.where(gaps["closes"] - gaps["opens"] > 20, OFFLOAD, KEEP).astype(np.int8)
        forecast = judge_sweep(problem, vectors, choices, 0.0)
        assert forecast is not None
        found[host_bytes] = forecast
    everything, half, nothing = found.values()
    assert everything.disk_bytes == 0 < half.disk_bytes < nothing.disk_bytes == everything.lower_tier_bytes
    assert everything.step_seconds < half.step_seconds < nothing.step_seconds


@given(
    job=jobs(),
    data=some.data(),
    share=some.floats(0.2, 1.1),
    turns=some.lists(some.tuples(some.integers(0, 10**6), some.integers(0, CHOICES - 1)), max_size=30),
)
def test_what_is_kept_from_sweep_to_sweep_changes_nothing(
    job: tuple[Trace, Costs], data: some.DataObject, share: float, turns: list[tuple[int, int]]
) -> None:
    """After any changes, some of them taken back, a room that was used comes to what a new one comes to."""
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1)
    used, before = ChoiceVectorPlanner(problem), np.zeros(0, dtype=np.int8)
    choices = draw_choices(data, len(used.keys))
    for draw, choice in turns if len(choices) else ():
        if draw % 3 == 0 and len(before):
            choices = before
        else:
            before, choices = choices, choices.copy()
            choices[draw % len(choices)] = choice
        new = make_sweep(used.columns)
        arguments = (used.columns, choices, problem.budget_bytes, 0.5, np.inf)
        sound = sweep(*arguments, new)
        assert sweep(*arguments, used.room) == sound
        if not sound:
            continue
        assert used.room.outcome.tolist() == new.outcome.tolist()
        found, wanted = used.room.segments, new.segments
        for field in ("choice", "segment", "leave", "wanted", "release_event", "back_event"):
            assert found.moves[field].tolist() == wanted.moves[field].tolist()
        count = int(wanted.tally[0].segments)
        assert (
            found.tally[["segments", "ops", "leaves"]].tolist() == wanted.tally[["segments", "ops", "leaves"]].tolist()
        )
        assert found.segments[:count].tolist() == wanted.segments[:count].tolist()
        for field in ("ops", "leaves"):
            length = int(wanted.tally[0][field])
            assert getattr(found, field)[:length].tolist() == getattr(wanted, field)[:length].tolist()
