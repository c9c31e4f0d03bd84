"""What a step teaches the next: what is copied in the shadow of the ops, what is dropped, and what to do without."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import pose
from elbowroom.residency.access_history import AccessHistory, StepAccesses
from elbowroom.residency.policies.predictive import TRIES, _Tried
from elbowroom.residency.prefetch_plan import ForeseenMove, plan_prefetch
from elbowroom.simulator.online import simulate_policy
from tests.generators import jobs, make_costs, make_link, make_residual_net

SIZE, COUNT = 100, 8


def record_step(*, own_seconds: float = 0.5) -> StepAccesses:
    """Each second something is saved, and then needed in reverse; each can be computed again from nothing."""
    history = AccessHistory()
    history.begin()
    for storage in range(COUNT):
        history.demand(SIZE * (storage + 1))
        use = history.saved(storage, SIZE, float(storage), SIZE * (storage + 1))
        use.learnt, use.free, use.own_seconds, use.own_bytes = 1, storage, own_seconds, SIZE
    for done, storage in enumerate(reversed(range(COUNT))):
        history.demand(SIZE * (COUNT - done))
        history.needed(storage, float(COUNT + done), SIZE * (COUNT - done))
    record = history.present
    record.was_tight = True
    return record


def test_what_is_needed_last_is_copied_where_the_link_is_fast() -> None:
    roles = plan_prefetch(record_step(), 5 * SIZE, lambda nbytes: (0.5, 0.5))
    assert all(role.is_copied for role in roles.values())
    assert len(roles) >= 3
    assert 0 in roles
    for place, role in roles.items():
        assert role.back < 2 * COUNT - 1 - place, "it is back before it is needed"


def test_what_is_cheap_to_compute_is_dropped_where_the_link_is_slow() -> None:
    roles = plan_prefetch(record_step(own_seconds=0.01), 5 * SIZE, lambda nbytes: (50.0, 50.0))
    assert len(roles) >= 3
    assert not any(role.is_copied for role in roles.values())


def test_what_cannot_be_computed_is_copied_however_slow_the_link() -> None:
    roles = plan_prefetch(record_step(own_seconds=float("inf")), 5 * SIZE, lambda nbytes: (4.0, 4.0))
    assert roles
    assert all(role.is_copied for role in roles.values())


def test_with_room_for_everything_nothing_is_foreseen() -> None:
    assert not plan_prefetch(record_step(), COUNT * SIZE, lambda nbytes: (0.5, 0.5))
    assert not plan_prefetch(StepAccesses(), 0, lambda nbytes: (0.5, 0.5))


def test_the_second_step_is_faster_than_the_first_and_the_fourth_no_slower() -> None:
    trace = make_residual_net(24, 1 << 20)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=2e9))
    problem = pose(trace, costs, 1)
    budget = (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2
    history = AccessHistory()
    seconds = [
        simulate_policy(trace, costs, budget, policy="predictive", history=history).step_seconds for _ in range(4)
    ]
    assert seconds[1] < seconds[0]
    assert seconds[3] <= min(seconds[1:3])


@given(first=jobs(), second=jobs(), share=some.floats(0.3, 1))
def test_access_history_of_another_step_do_no_harm_to_the_budget(
    first: tuple[Trace, Costs], second: tuple[Trace, Costs], share: float
) -> None:
    history = AccessHistory()
    for trace, costs in (first, second, first, second, second):
        problem = pose(trace, costs, 1, min_offload_bytes=1)
        least, most = problem.floor.peak_bytes, problem.plain.peak_bytes
        budget = least + int(share * (most - least))
        try:
            forecast = simulate_policy(trace, costs, budget, policy="predictive", min_bytes=1, history=history)
        except Infeasible:
            continue
        assert forecast.peak_bytes <= budget
        beyond = forecast.step_seconds - forecast.recompute_seconds - forecast.stall_seconds
        assert beyond == pytest.approx(problem.plain.step_seconds)


def test_a_half_duplex_link_is_survived() -> None:
    trace = make_residual_net(12, 1 << 20)
    link = dataclasses.replace(make_link(per_second=1e9), half_duplex=True)
    costs = make_costs(trace, op_seconds=1e-3, link=link)
    problem = pose(trace, costs, 1)
    budget = (problem.floor.peak_bytes + problem.plain.peak_bytes) // 2
    history = AccessHistory()
    for _ in range(3):
        assert simulate_policy(trace, costs, budget, policy="predictive", history=history).peak_bytes <= budget


def test_of_what_was_foreseen_the_fastest_is_kept_and_no_step_that_broke_off() -> None:
    def make_record(events: int, seconds: float) -> StepAccesses:
        return StepAccesses(seconds=[0.0] * events, end_seconds=seconds, is_foreseen=True)

    assert TRIES == 2
    made = [{0: ForeseenMove(True, 1)}, {0: ForeseenMove(False, 1)}]
    tried, left = _Tried(), iter(made)
    assert tried.choose(make_record(9, 8.0), lambda: next(left)) == made[0]
    assert tried.choose(make_record(9, 7.0), lambda: next(left)) == made[1]
    broken = make_record(5, 1.0)
    assert tried.choose(broken, lambda: next(left)) == made[0]
    assert tried.choose(broken, lambda: next(left)) == made[0]
    tried, left = _Tried(), iter(made)
    for seconds in (3.0, 7.0):
        tried.choose(make_record(9, seconds), lambda: next(left))
    assert tried.choose(make_record(9, 8.0), lambda: next(left)) == {}, "the first step was the fastest"


def test_what_never_recurs_is_not_foreseen() -> None:
    """It takes as long as many a step."""
    history = AccessHistory()
    asked = []
    for depth in (8, 9, 10, 11, 12, 12, 12):
        trace = make_residual_net(depth, 1 << 20)
        costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
        simulate_policy(trace, costs, 1 << 40, policy="predictive", min_bytes=1, history=history)
        asked.append(sum(bool(each._made) for each in history.tried.values()))
    assert asked == [0, 1, 1, 1, 1, 1, 2]
