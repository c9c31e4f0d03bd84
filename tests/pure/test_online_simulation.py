"""Policies over made-up steps on the virtual clock: the budget, the seconds, and what a step teaches the next."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom._family import names
from elbowroom.errors import Infeasible, TraceError, UnknownMember, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Decision, Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import plan, pose
from elbowroom.residency import plan_policy, policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.context import PolicyContext
from elbowroom.simulator.online import simulate_policy
from elbowroom.simulator.simulate import simulate
from tests.generators import jobs, keep_everything, make_costs, make_link, make_residual_net

pytestmark = pytest.mark.usefixtures("small_hosts")

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
        forecast = simulate_policy(trace, costs, budget, policy=policy, min_bytes=1)
    except Infeasible as error:
        found = error.needed_bytes
    else:
        found = 0
    if found:
        assert found > budget
        assert budget < most
        return
    assert forecast.peak_bytes <= budget
    beyond = forecast.step_seconds - forecast.recompute_seconds - forecast.stall_seconds
    assert beyond == pytest.approx(problem.plain.step_seconds)
    assert forecast.reloaded_bytes == 0 or forecast.offloaded_bytes > 0


@given(job=jobs(), policy=some.sampled_from(names(policies)))
def test_with_room_for_everything_it_is_the_plain_step(job: tuple[Trace, Costs], policy: str) -> None:
    trace, costs = job
    plain = simulate(trace, costs, keep_everything(costs), allocator="caching")
    forecast = simulate(trace, costs, policy=policy, budget_bytes=1 << 60, allocator="caching")
    assert forecast.begin_seconds == pytest.approx(plain.begin_seconds)
    seconds = forecast.step_seconds
    assert seconds == pytest.approx(plain.step_seconds)
    assert dataclasses.replace(forecast, begin_seconds=plain.begin_seconds, step_seconds=plain.step_seconds) == plain
    at_peak = simulate(trace, costs, policy=policy, budget_bytes=plain.peak_bytes)
    assert (at_peak.evictions, at_peak.replays) == (0, 0)


class Follow:
    """Carries out a plan where a policy is asked for."""

    uses_addresses = False

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __call__(self, context: PolicyContext, history: AccessHistory) -> plan_policy.Policy:
        return plan_policy.Policy(plan_policy.list_moves(self._plan))


def is_gone(trace: Trace, decision: Decision) -> bool:
    """Whether nobody but autograd has a storage once it is released, so that it comes back by a copy."""
    uses = [need for need in trace.needs if trace.saves[need.save].storage == decision.storage]
    held_until = max((need.released for need in uses if need.tick <= decision.release), default=-1)
    return max(held_until, trace.storages[decision.storage].released) <= decision.release


@settings(max_examples=50)
@given(job=jobs(disk=True), data=some.data())
def test_both_kinds_of_steps_are_carried_out_by_one_device(job: tuple[Trace, Costs], data: some.DataObject) -> None:
    """The same moves take the same bytes and seconds, with a disk behind the host and without."""
    trace, costs = job
    costs = dataclasses.replace(costs, hook_seconds=0.0)
    peak = pose(trace, costs, 0).plain.peak_bytes
    made = plan(trace, costs, peak, strategy="offload_all", min_offload_bytes=1)
    made = dataclasses.replace(made, decisions=tuple(each for each in made.decisions if is_gone(trace, each)))
    hooks = [entry.tick for entry in (*trace.saves, *trace.needs)]
    released, reloaded = (
        {min((tick for tick in hooks if tick >= getattr(each, name)), default=-1) for each in made.decisions}
        for name in ("release", "back")
    )
    host_bytes = data.draw(some.one_of(some.none(), some.integers(0, peak)))
    expected = simulate(trace, costs, made, host_bytes=host_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elbowroom.simulator.online.get", lambda *_: Follow(made))
        forecast = simulate_policy(trace, costs, 1 << 60, min_bytes=1, host_bytes=host_bytes)
    assert all(online <= planned for online, planned in zip(forecast.live_bytes, expected.live_bytes, strict=True))
    # A plan's forecast counts what one hook releases together with what it reloads.
    if not released & reloaded:
        assert forecast.live_bytes == expected.live_bytes
    assert forecast.step_seconds == pytest.approx(expected.step_seconds)
    assert forecast.begin_seconds == pytest.approx(expected.begin_seconds)
    assert forecast.stall_seconds == pytest.approx(expected.stall_seconds)
    figures = ("offloaded_bytes", "reloaded_bytes", "lower_tier_bytes", "disk_bytes", "evictions", "replays")
    assert [getattr(forecast, name) for name in figures] == [getattr(expected, name) for name in figures]


@pytest.mark.parametrize("policy", names(policies))
def test_a_net_under_pressure(policy: str) -> None:
    budget = (PROBLEM.floor.peak_bytes + PROBLEM.plain.peak_bytes) // 2
    forecast = simulate_policy(TRACE, COSTS, budget, policy=policy)
    assert forecast.peak_bytes <= budget
    assert forecast.evictions > 0
    assert forecast.step_seconds > PROBLEM.plain.step_seconds
    assert simulate_policy(TRACE, COSTS, budget, policy=policy) == forecast
    assert len(forecast.live_bytes) == TRACE.end
    assert forecast.peak_bytes == max(forecast.live_bytes) == forecast.live_bytes[forecast.peak_tick]
    assert list(forecast.begin_seconds) == sorted(forecast.begin_seconds)
    assert forecast.begin_seconds[-1] == pytest.approx(forecast.step_seconds)
    reserved = simulate(TRACE, COSTS, policy=policy, budget_bytes=budget, allocator="caching").reserved_bytes
    assert forecast.peak_bytes <= reserved
    if policy in ("lru", "size"):
        assert forecast.replays == 0
        assert forecast.reloaded_bytes > 0
    if policy == "dtr":
        assert forecast.replays > 0


def test_below_the_floor_the_op_is_named() -> None:
    with pytest.raises(Infeasible) as caught:
        simulate_policy(TRACE, COSTS, 1000)
    assert caught.value.op == TRACE.ops[0].name
    assert caught.value.needed_bytes > 1000


def test_a_step_may_be_given_up() -> None:
    budget = (PROBLEM.floor.peak_bytes + PROBLEM.plain.peak_bytes) // 2
    with pytest.raises(Infeasible, match="too long"):
        simulate_policy(TRACE, COSTS, budget, most_seconds=PROBLEM.plain.step_seconds / 2)


def test_bad_input() -> None:
    with pytest.raises(UnknownMember, match="delta"):
        simulate_policy(TRACE, COSTS, 1 << 40, policy="no_such")
    with pytest.raises(TraceError):
        simulate_policy(make_residual_net(2, 64), COSTS, 1 << 40)
    with pytest.raises(UsageError, match="need a plan"):
        simulate(TRACE, COSTS, policy="delta", budget_bytes=1 << 40, allocator="planned")
    with pytest.raises(UnknownMember, match="caching"):
        simulate(TRACE, COSTS, policy="delta", budget_bytes=1 << 40, allocator="no_such")


def test_a_plan_or_a_policy_is_simulated() -> None:
    made = keep_everything(COSTS)
    for both_or_none in ({}, {"plan": made, "policy": "delta", "budget_bytes": 1}):
        with pytest.raises(UsageError, match="a plan or a policy"):
            simulate(TRACE, COSTS, **both_or_none)
    for misplaced in ({"plan": made, "budget_bytes": 1}, {"policy": "delta"}):
        with pytest.raises(UsageError, match="budget_bytes belongs to a policy"):
            simulate(TRACE, COSTS, **misplaced)
    with pytest.raises(UsageError, match="placement"):
        simulate(TRACE, COSTS, policy="delta", budget_bytes=1, placement=Placement())


def test_habits_know_when_something_is_needed_next() -> None:
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


def test_habits_do_not_take_one_save_for_another() -> None:
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
