"""Replays that share ops are merged if that saves time and fits; the rest of the plan stays the same."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Role, Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.problem import Problem, pose
from elbowroom.planner.schedule.draft import Draft, Option
from elbowroom.planner.schedule.merge_replays import merge_replays
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from tests.generators import KIB, Program, jobs, make_costs, make_link
from tests.oracles import follow


def make_fan(branches: int, nbytes: int, pause_bytes: int = 0) -> Trace:
    """Return a step whose branches read one stem; autograd saves their results, not the stem. Then a temporary."""
    program = Program()
    batch = program.resident(KIB, Role.INPUT)
    stem, saves = program.op("stem", [batch], nbytes), []
    for _ in range(branches):
        branch = program.op("branch", [stem], nbytes)
        saves.append(program.save(branch))
        program.release(storage=branch)
    program.release(storage=stem)
    if pause_bytes:
        program.release(storage=program.op("pause", [batch], pause_bytes, role=Role.TEMPORARY))
    for save in reversed(saves):
        need = program.need(save)
        program.op("back", [program._saves[save].storage], KIB, role=Role.TEMPORARY)
        program.release(need=need)
        program.release(save=save)
    return program.finish("fan")


def drop(problem: Problem, draft: Draft) -> Plan:
    made = problem.drafter.finish(draft, "test", problem.budget_bytes)
    assert made is not None
    return made


def drop_all(problem: Problem) -> Plan:
    return drop(problem, dict.fromkeys(problem.drafter.gaps, Option(Choice.RECOMPUTE)))


def test_an_unsaved_stem_is_replayed_once() -> None:
    trace = make_fan(6, 64 * KIB)
    costs = make_costs(trace, op_seconds=1e-3)
    problem = pose(trace, costs, 1 << 40, min_offload_bytes=1)
    made = drop_all(problem)
    merged = merge_replays(problem, made)
    check(trace, merged)
    follow(trace, Machine(plan_policy.Policy(plan_policy.list_moves(merged)), merged.segments))
    assert len(made.segments) == 5  # the last branch is needed at once
    assert len(merged.segments) == 1
    replay = problem.drafter.replay
    assert replay.run(made).recompute_seconds == pytest.approx(10e-3)
    assert replay.run(merged).recompute_seconds == pytest.approx(6e-3)
    assert merge_replays(problem, merged) == merged
    assert merged.strategy == "test"


def test_the_bound_is_tight_for_merged_replays() -> None:
    trace = make_fan(6, 64 * KIB, pause_bytes=512 * KIB)  # no branch fits next to the temporary; all fit after it
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1.0))
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, problem.floor.peak_bytes, min_offload_bytes=1)
    merged = problem.drafter.replay.run(merge_replays(problem, drop_all(problem)))
    assert problem.fits(merged) and merged.recompute_seconds == pytest.approx(7e-3)
    assert find_bound(problem).cover_seconds == pytest.approx(merged.step_seconds, rel=1e-6)


def test_replays_are_merged_only_as_far_as_the_budget_allows() -> None:
    trace = make_fan(6, 64 * KIB)
    costs = make_costs(trace, op_seconds=1e-3)
    roomy = pose(trace, costs, 1 << 40, min_offload_bytes=1)
    replay, made = roomy.drafter.replay, drop_all(roomy)
    least, most = (replay.run(each).peak_bytes for each in (made, merge_replays(roomy, made)))
    assert least < most
    seconds = []
    for step in range(5):
        problem = pose(trace, costs, least + (most - least) * step // 4, min_offload_bytes=1)
        forecast = replay.run(merge_replays(problem, made))
        assert problem.fits(forecast)
        seconds.append(forecast.step_seconds)
    assert seconds == sorted(seconds, reverse=True) and len(set(seconds)) >= 3


def test_a_plan_that_does_not_fit_is_returned_unchanged() -> None:
    trace = make_fan(4, 64 * KIB)
    problem = pose(trace, make_costs(trace), 1, min_offload_bytes=1)
    made = drop_all(problem)
    assert merge_replays(problem, made) is made


@given(job=jobs(), share=some.floats(0.2, 1.1), seed=some.integers(0, 1 << 30))
def test_a_merged_plan_is_valid_fits_and_is_no_slower(job: tuple[Trace, Costs], share: float, seed: int) -> None:
    trace, costs = job
    dice = random.Random(seed)
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1)
    draft = {
        key: Option(dice.choice([Choice.RECOMPUTE, Choice.RECOMPUTE, Choice.OFFLOAD]), release_now=True)
        for key in problem.drafter.gaps
        if dice.random() < 0.8
    }
    made = problem.drafter.finish(draft, "test", problem.budget_bytes)
    if made is None:
        return
    merged, replay = merge_replays(problem, made), problem.drafter.replay
    check(trace, merged)
    follow(trace, Machine(plan_policy.Policy(plan_policy.list_moves(merged)), merged.segments))
    before, after = replay.run(made), replay.run(merged)
    assert after.step_seconds <= before.step_seconds
    assert problem.fits(after) == problem.fits(before)
    assert (merged == made) == (after.step_seconds == before.step_seconds)
