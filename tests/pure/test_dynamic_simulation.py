"""Policies over made-up steps on the virtual clock: the budget, the seconds, and what a step teaches the next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom._family import names
from elbowroom.errors import Infeasible, TraceError, UnknownMember
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import pose
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.simulator.dynamic import simulate_dynamic
from tests.generators import jobs, make_costs, make_link, make_residual_net

TRACE = make_residual_net(8, 1 << 20)
COSTS = make_costs(TRACE, op_seconds=1e-3, link=make_link(per_second=1e9))
PROBLEM = pose(TRACE, COSTS, 1)


@given(job=jobs(), policy=some.sampled_from(names(policies)), share=some.floats(0, 1))
def test_within_the_budget_or_infeasible(job: tuple[Trace, Costs], policy: str, share: float) -> None:
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    least, most = problem.floor.peak_bytes, problem.plain.peak_bytes
    budget = least + int(share * (most - least))
    try:
        course = simulate_dynamic(trace, costs, budget, policy=policy, min_bytes=1)
    except Infeasible as error:
        found = error.needed_bytes
    else:
        found = 0
    if found:
        assert found > budget
        assert budget < most
        return
    assert course.peak_bytes <= budget
    beyond = course.step_seconds - course.recompute_seconds - course.stall_seconds
    assert beyond == pytest.approx(problem.plain.step_seconds)
    assert course.reloaded_bytes == 0 or course.offloaded_bytes > 0


@given(job=jobs(), policy=some.sampled_from(names(policies)))
def test_with_room_for_everything_nothing_moves(job: tuple[Trace, Costs], policy: str) -> None:
    trace, costs = job
    plain = pose(trace, costs, 1).plain
    course = simulate_dynamic(trace, costs, 1 << 60, policy=policy)
    assert (course.peak_bytes, course.evictions, course.replays) == (plain.peak_bytes, 0, 0)
    assert course.step_seconds == pytest.approx(plain.step_seconds)
    at_peak = simulate_dynamic(trace, costs, plain.peak_bytes, policy=policy)
    assert at_peak.evictions == 0


@pytest.mark.parametrize("policy", names(policies))
def test_a_net_under_pressure(policy: str) -> None:
    budget = (PROBLEM.floor.peak_bytes + PROBLEM.plain.peak_bytes) // 2
    course = simulate_dynamic(TRACE, COSTS, budget, policy=policy)
    assert course.peak_bytes <= budget
    assert course.evictions > 0
    assert course.step_seconds > PROBLEM.plain.step_seconds
    assert simulate_dynamic(TRACE, COSTS, budget, policy=policy) == course
    if policy in ("lru", "size"):
        assert course.replays == 0
        assert course.reloaded_bytes > 0
    if policy == "dtr":
        assert course.replays > 0


def test_below_the_floor_the_op_is_named() -> None:
    with pytest.raises(Infeasible) as caught:
        simulate_dynamic(TRACE, COSTS, 1000)
    assert caught.value.op == TRACE.ops[0].name
    assert caught.value.needed_bytes > 1000


def test_a_step_may_be_given_up() -> None:
    budget = (PROBLEM.floor.peak_bytes + PROBLEM.plain.peak_bytes) // 2
    with pytest.raises(Infeasible, match="too long"):
        simulate_dynamic(TRACE, COSTS, budget, most_seconds=PROBLEM.plain.step_seconds / 2)


def test_bad_input() -> None:
    with pytest.raises(UnknownMember, match="delta"):
        simulate_dynamic(TRACE, COSTS, 1 << 40, policy="no_such")
    with pytest.raises(TraceError):
        simulate_dynamic(make_residual_net(2, 64), COSTS, 1 << 40)


def test_access_history_know_when_something_is_needed_next() -> None:
    history = AccessHistory()
    for _ in range(2):
        history.begin()
        for storage in (10, 11, 12):
            history.saved(storage, 8 * storage)
        found = [history.next_use(storage) for storage in (10, 11, 12)]
        for storage in (12, 11, 10):
            history.needed(storage)
    assert found == [3, 2, 1]
    assert history.next_use(10) is None, "it is not needed again"


def test_access_history_do_not_take_one_save_for_another() -> None:
    history = AccessHistory()
    history.begin()
    history.saved(1, 8)
    history.needed(1)
    history.begin()
    history.saved(5, 16)
    assert history.next_use(5) is None, "it has other bytes"
    assert history.next_use(9) is None, "it was never saved"
    history.begin()
    history.begin()
    history.saved(6, 8)
    assert history.next_use(6) == 1, "steps without needs teach nothing"
    history.freed(6)
    assert history.next_use(6) is None
