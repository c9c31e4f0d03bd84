"""Plans that move the model's state beside the activations, within one budget."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom import check, plan, simulate
from elbowroom.errors import Infeasible, UnknownMember
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.bounds.fluid import solve_fluid
from elbowroom.planner.options import Manages, moves_state
from elbowroom.planner.problem import list_strategies, make_lowest, pose
from elbowroom.planner.state.retiming import Retimer
from tests.generators import KIB, Layer, Optimizer, cyclic_steps, make_costs, make_link, make_trace

pytestmark = pytest.mark.usefixtures("small_hosts")

EFFORT = "auto:effort=0.02"


def try_plan(trace: Trace, costs: Costs, budget_bytes: int, manages: Manages, strategy: str = EFFORT) -> Plan | None:
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1, manages=manages)
    except Infeasible as error:
        return None if error.needed_bytes > budget_bytes else pytest.fail("it needs no more than it has")
    check(trace, made)
    assert simulate(trace, costs, made).peak_bytes <= budget_bytes
    return made


@given(cyclic_steps(), some.floats(0.0, 1.0))
@settings(max_examples=15, deadline=None)
def test_state_that_may_move_makes_no_step_slower_and_no_budget_impossible(
    step: tuple[Trace, Costs], share: float
) -> None:
    trace, costs = step
    joint = pose(trace, costs, 1, min_offload_bytes=1, manages=Manages.EVERYTHING)
    least, most = joint.floor.peak_bytes, joint.plain.peak_bytes
    budget_bytes = int(least + share * (most - least))
    everything = try_plan(trace, costs, budget_bytes, Manages.EVERYTHING)
    activations = try_plan(trace, costs, budget_bytes, Manages.ACTIVATIONS)
    assert everything is not None
    bound = find_bound(dataclasses.replace(joint, budget_bytes=budget_bytes))
    assert bound.seconds <= simulate(trace, costs, everything).step_seconds * (1 + 1e-9)
    assert bound.floor_bytes == least
    if activations is not None:
        assert not activations.state
        slower = simulate(trace, costs, everything).step_seconds
        assert slower <= simulate(trace, costs, activations).step_seconds * (1 + 1e-9)
    assert try_plan(trace, costs, least - 1, Manages.EVERYTHING) is None


@given(cyclic_steps(), some.floats(0.3, 1.0))
@settings(max_examples=60, deadline=None)
def test_state_that_tensile_may_move_is_never_worse(step: tuple[Trace, Costs], share: float) -> None:
    trace, costs = step
    budget_bytes = int(share * pose(trace, costs, 1).plain.peak_bytes)
    made = try_plan(trace, costs, budget_bytes, Manages.EVERYTHING, "tensile")
    activations = try_plan(trace, costs, budget_bytes, Manages.ACTIVATIONS, "tensile")
    if activations is not None:
        assert made is not None
        assert simulate(trace, costs, made).step_seconds <= simulate(trace, costs, activations).step_seconds


@given(cyclic_steps(), some.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_no_plan_beats_the_relaxation_of_state_and_activations(step: tuple[Trace, Costs], share: float) -> None:
    trace, costs = step
    problem = pose(trace, costs, 1, min_offload_bytes=1, manages=Manages.EVERYTHING)
    least, plain = problem.floor.peak_bytes, problem.plain
    budget_bytes = int(least + share * (plain.peak_bytes - least))
    fluid = solve_fluid(dataclasses.replace(problem, budget_bytes=budget_bytes))
    made = try_plan(trace, costs, budget_bytes, Manages.EVERYTHING)
    assert fluid is not None
    assert made is not None
    assert simulate(trace, costs, made).step_seconds >= fluid.seconds * (1 - 1e-6)


@given(cyclic_steps(), some.floats(0.0, 1.0))
@settings(max_examples=40, deadline=None)
def test_shifted_moves_can_be_carried_out_and_wait_no_longer(step: tuple[Trace, Costs], share: float) -> None:
    trace, costs = step
    problem = pose(trace, costs, 1, min_offload_bytes=1, manages=Manages.EVERYTHING)
    lowest = make_lowest(problem.drafter, 1, Manages.EVERYTHING)
    spare_bytes = int(share * (problem.plain.peak_bytes - problem.floor.peak_bytes))
    problem = dataclasses.replace(problem, budget_bytes=problem.floor.peak_bytes + spare_bytes)
    shifted = Retimer(problem).shift(lowest)
    check(trace, shifted)
    forecast = simulate(trace, costs, shifted)
    assert forecast.peak_bytes <= problem.budget_bytes
    assert forecast.step_seconds <= simulate(trace, costs, lowest).step_seconds


@given(cyclic_steps())
@settings(max_examples=60, deadline=None)
def test_the_floor_holds_what_ops_use_and_nothing_else_that_can_move(step: tuple[Trace, Costs]) -> None:
    trace, costs = step
    drafter = pose(trace, costs, 1, min_offload_bytes=1).drafter
    held = simulate(trace, costs, make_lowest(drafter, 1, Manages.EVERYTHING)).live_bytes
    resident = simulate(trace, costs, make_lowest(drafter, 1, Manages.ACTIVATIONS)).live_bytes
    used = {(use.storage, use.tick) for uses in trace.state_uses.values() for use in uses}
    can_leave = trace.state.union(trace.earlier_gradients.values())
    for tick in range(trace.end):
        away = sum(
            home.nbytes
            for home in trace.storages
            if home.id in can_leave and home.created <= tick < home.released and (home.id, tick) not in used
        )
        assert held[tick] == resident[tick] - away


def make_model(*, layers: int = 8, optimizer: Optimizer | None = None) -> Trace:
    chain = [
        Layer(inputs=(position - 1,), nbytes=64 * KIB, parameter_bytes=256 * KIB, keeps="io")
        for position in range(layers)
    ]
    return make_trace(chain, optimizer=optimizer or Optimizer(), name="mostly state")


def test_a_budget_below_the_bytes_of_the_state_has_a_plan() -> None:
    trace = make_model()
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e10))
    state_bytes = sum(trace.storages[storage].nbytes for storage in trace.state if trace.storages[storage].created < 0)
    with pytest.raises(Infeasible):
        plan(trace, costs, state_bytes // 2, strategy=EFFORT)
    made = plan(trace, costs, state_bytes // 2, strategy=EFFORT, manages="everything")
    forecast = simulate(trace, costs, made)
    assert forecast.peak_bytes <= state_bytes // 2
    plain = pose(trace, costs, 1).plain
    assert forecast.step_seconds < 1.05 * plain.step_seconds  # the link is fast enough to hide all moves


def make_hungry_model() -> tuple[Trace, Costs]:
    """A step whose peak is one op in its middle."""
    trace = make_model(optimizer=Optimizer(group=2))
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e10))
    hungry = len(trace.ops) // 2
    workspace_bytes = tuple((8 << 20) * (index == hungry) for index in range(len(trace.ops)))
    costs = dataclasses.replace(costs, workspace_bytes=workspace_bytes)
    assert pose(trace, costs, 1).plain.peak_tick == trace.ops[hungry].tick
    return trace, costs


def test_a_plan_whose_link_has_time_waits_for_nothing() -> None:
    trace, costs = make_hungry_model()
    plain = pose(trace, costs, 1).plain
    made = plan(trace, costs, plain.peak_bytes - 8 * 256 * KIB, strategy=EFFORT, manages="everything")
    forecast = simulate(trace, costs, made)
    assert made.state and not made.decisions
    assert forecast.step_seconds == pytest.approx(plain.step_seconds, rel=0.002)


def test_one_op_over_all_parameters_needs_all_that_it_touches() -> None:
    trace = make_model(optimizer=Optimizer(group=1000))
    costs = make_costs(trace)
    update = trace.ops[-1]
    touched = {view.storage for view in update.reads}
    with pytest.raises(Infeasible, match="update") as caught:
        plan(trace, costs, 1 << 20, strategy=EFFORT, manages="everything")
    others = [each for each in trace.storages if each.role not in ("parameter", "gradient", "optimizer_state")]
    left = sum(each.nbytes for each in others if each.created < 0)
    assert caught.value.needed_bytes == sum(trace.storages[each].nbytes for each in touched) + left
    assert dict(caught.value.in_the_way)  # says what has to be there
    grouped = make_model(optimizer=Optimizer(group=2))
    assert pose(grouped, make_costs(grouped), 1, manages=Manages.EVERYTHING).floor.peak_bytes < 10 * 256 * KIB


def test_the_tier_below_holds_no_more_than_it_may() -> None:
    trace = make_model()
    costs = make_costs(trace, op_seconds=1e-3)
    budget_bytes = pose(trace, costs, 1).plain.peak_bytes * 3 // 4
    needed = simulate(trace, costs, plan(trace, costs, budget_bytes, strategy=EFFORT, manages="everything"))
    host_bytes = needed.lower_tier_bytes * 5 // 4
    made = plan(trace, costs, budget_bytes, strategy=EFFORT, host_bytes=host_bytes, manages="everything")
    assert simulate(trace, costs, made).lower_tier_bytes <= host_bytes
    with pytest.raises(Infeasible):
        plan(trace, costs, budget_bytes, strategy=EFFORT, host_bytes=256 * KIB, manages="everything")
    with_disk = dataclasses.replace(costs, further_links=(make_link(per_second=1e8),))
    made = plan(trace, with_disk, budget_bytes, strategy=EFFORT, host_bytes=1024 * KIB, manages="everything")
    forecast = simulate(trace, with_disk, made, host_bytes=1024 * KIB)
    assert forecast.peak_bytes <= budget_bytes and forecast.disk_bytes > 0


@pytest.mark.parametrize("strategy", list_strategies())
def test_each_strategy_says_whether_it_moves_the_state(strategy: str) -> None:
    trace, costs = make_hungry_model()
    plain = pose(trace, costs, 1).plain
    made = plan(trace, costs, plain.peak_bytes, strategy=strategy, manages="everything")
    assert not made.state
    try:
        made = plan(trace, costs, plain.peak_bytes - (2 << 20), strategy=strategy, manages="everything")
    except Infeasible:
        assert not moves_state(strategy)
    else:
        assert moves_state(strategy) and made.state


def test_an_unknown_choice_is_refused() -> None:
    trace = make_model(layers=2)
    with pytest.raises(UnknownMember, match="activations, everything"):
        plan(trace, make_costs(trace), 1 << 30, manages="most")
