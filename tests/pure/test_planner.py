"""Planning of traces that are small enough to check by hand. No torch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import Infeasible, TraceError, UnknownMember
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import list_strategies, plan, pose
from elbowroom.simulator.simulate import simulate
from tests.generators import (
    KIB,
    Layer,
    jobs,
    keep_everything,
    make_chain,
    make_costs,
    make_link,
    make_residual_net,
    make_trace,
    make_unet,
)

CHAIN = make_chain([256 * KIB] * 8)
FAST = make_costs(CHAIN, op_seconds=1e-3, link=make_link(per_second=1e12, latency_seconds=0.0))
SLOW = make_costs(CHAIN, op_seconds=1e-6, link=make_link(per_second=1e6))


def peak(trace: Trace, costs: Costs) -> int:
    return simulate(trace, costs, keep_everything(costs)).peak_bytes


def choices(made: Plan) -> set[Choice]:
    return {decision.choice for decision in made.decisions}


def test_a_plan_is_empty_if_everything_fits() -> None:
    made = plan(CHAIN, FAST, peak(CHAIN, FAST))
    assert made.decisions == ()


def test_a_fast_link_is_used_without_slowdown() -> None:
    made = plan(CHAIN, FAST, peak(CHAIN, FAST) * 3 // 4)
    assert choices(made) == {Choice.OFFLOAD}
    plain = simulate(CHAIN, FAST, keep_everything(FAST)).step_seconds
    assert simulate(CHAIN, FAST, made).step_seconds == pytest.approx(plain, rel=1e-3)


def test_cheap_ops_are_recomputed_if_the_link_is_slow() -> None:
    assert choices(plan(CHAIN, SLOW, peak(CHAIN, SLOW) * 3 // 4)) == {Choice.RECOMPUTE}


def test_random_ops_are_not_recomputed() -> None:
    trace = make_chain([256 * KIB] * 8, barriers=frozenset(range(8)))
    costs = make_costs(trace, op_seconds=1e-6, link=make_link(per_second=1e6))
    for strategy in ("auto", "recompute_all"):
        try:
            made = plan(trace, costs, peak(trace, costs) * 3 // 4, strategy=strategy)
        except Infeasible:
            assert strategy == "recompute_all"
        else:
            assert choices(made) == {Choice.OFFLOAD}


@pytest.mark.parametrize(
    "trace", [make_chain([256 * KIB] * 32), make_residual_net(16, 256 * KIB)], ids=["chain", "residual"]
)
def test_recompute_all_halves_the_peak(trace: Trace) -> None:
    costs = make_costs(trace, op_seconds=1e-3)
    plain = simulate(trace, costs, keep_everything(costs))
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, 1, strategy="recompute_all")
    lowest = caught.value.needed_bytes
    assert lowest < plain.peak_bytes * 0.55
    made = simulate(trace, costs, plan(trace, costs, lowest, strategy="recompute_all"))
    assert made.peak_bytes <= lowest
    # No op of the forward pass is replayed more than once.
    assert made.recompute_seconds <= 1e-3 * sum(op.tick < trace.needs[0].tick for op in trace.ops)


@pytest.mark.parametrize("strategy", list_strategies())
def test_every_strategy_states_its_own_smallest_budget(strategy: str) -> None:
    with pytest.raises(Infeasible) as caught:
        plan(CHAIN, FAST, 1, strategy=strategy)
    assert peak_of(strategy, caught.value.needed_bytes) == caught.value.needed_bytes
    if strategy == "keep_all":
        assert caught.value.needed_bytes == peak(CHAIN, FAST)


def peak_of(strategy: str, budget_bytes: int) -> int:
    return simulate(CHAIN, FAST, plan(CHAIN, FAST, budget_bytes, strategy=strategy)).peak_bytes


def test_small_storages_stay_on_the_device() -> None:
    trace = make_chain([8 * KIB, 256 * KIB] * 4)
    costs = make_costs(trace, op_seconds=1e-3)
    made = plan(trace, costs, 10**9, strategy="offload_all")
    assert {trace.storages[decision.storage].nbytes for decision in made.decisions} == {256 * KIB}
    everything = plan(trace, costs, 10**9, strategy="offload_all", min_offload_bytes=1)
    assert 8 * KIB in {trace.storages[decision.storage].nbytes for decision in everything.decisions}


def test_infeasible_reports_budget_need_op_and_blocks() -> None:
    with pytest.raises(Infeasible) as caught:
        plan(CHAIN, FAST, 100 * KIB)
    error = caught.value
    assert error.budget_bytes == 100 * KIB
    assert error.needed_bytes == pose(CHAIN, FAST, 1).floor.peak_bytes
    assert error.op in {op.name for op in CHAIN.ops}
    assert error.in_the_way
    assert len(dict(error.in_the_way)) == len(error.in_the_way)
    assert all(nbytes > 0 for _, nbytes in error.in_the_way)
    assert sum(nbytes for _, nbytes in error.in_the_way) <= error.needed_bytes
    for said in (str(100 * KIB), "100.0 KiB", str(error.needed_bytes), error.op, error.in_the_way[0][0]):
        assert said in str(error)
    made = plan(CHAIN, FAST, error.needed_bytes)
    assert simulate(CHAIN, FAST, made).peak_bytes == error.needed_bytes


def test_an_unknown_strategy_is_rejected_with_the_known_names() -> None:
    with pytest.raises(UnknownMember) as caught:
        plan(CHAIN, FAST, 10**9, strategy="magic")
    assert all(name in str(caught.value) for name in list_strategies())


def test_costs_of_another_trace_are_rejected() -> None:
    with pytest.raises(TraceError, match="costs"):
        plan(make_chain([KIB] * 3), FAST, 10**9)


def test_a_trace_without_saves_can_be_planned() -> None:
    trace = make_trace([Layer(inputs=(-1,), nbytes=64 * KIB, keeps="")])
    costs = make_costs(trace)
    assert plan(trace, costs, peak(trace, costs)).decisions == ()
    with pytest.raises(Infeasible):
        plan(trace, costs, peak(trace, costs) - 1)


@pytest.mark.parametrize(
    "trace", [make_residual_net(6, 512 * KIB), make_unet(5, 4096 * KIB)], ids=lambda each: each.name
)
@pytest.mark.parametrize("per_second", [1e8, 1e9, 1e10])
def test_ordinary_nets_fit_every_budget(trace: Trace, per_second: float) -> None:
    costs = make_costs(trace, op_seconds=1e-4, workspace_bytes=KIB, link=make_link(per_second=per_second))
    most, least = peak(trace, costs), pose(trace, costs, 1).floor.peak_bytes
    assert least < most * 0.6
    plain = simulate(trace, costs, keep_everything(costs)).step_seconds
    slowest = simulate(trace, costs, plan(trace, costs, least, strategy="offload_all")).step_seconds
    for share in range(6):
        budget_bytes = least + (most - least) * share // 5
        made = plan(trace, costs, budget_bytes)
        check(trace, made)
        forecast = simulate(trace, costs, made)
        assert forecast.peak_bytes <= budget_bytes
        assert plain <= forecast.step_seconds + 1e-12 <= slowest + 2e-12


@settings(max_examples=15)
@given(jobs())
def test_a_plan_depends_on_its_input_alone(job: tuple[Trace, Costs]) -> None:
    """The order of iteration must not show, and neither must the trace's name."""
    trace, costs = job
    budget_bytes = (peak(trace, costs) + pose(trace, costs, 1, min_offload_bytes=1).floor.peak_bytes) // 2
    made = plan(trace, costs, budget_bytes, min_offload_bytes=1)
    renamed = dataclasses.replace(trace, name="another name")
    assert plan(renamed, costs, budget_bytes, min_offload_bytes=1) == made
    assert list(made.decisions) == sorted(made.decisions, key=lambda each: (each.storage, each.gap))


def test_a_host_too_small_to_stage_copies_has_no_disk_behind_it() -> None:
    trace = make_chain([4 << 20] * 6)
    costs = dataclasses.replace(make_costs(trace, link=make_link()), further_links=(make_link(per_second=1e9),))
    budget_bytes = simulate(trace, costs, keep_everything(costs)).peak_bytes * 2 // 3
    least_bytes = count_least_host_bytes()
    for host_bytes in (0, 1, 1024, least_bytes - 1):
        with pytest.raises(Infeasible) as caught:
            plan(trace, costs, budget_bytes, strategy="offload_all", host_bytes=host_bytes)
        assert caught.value.needed_host_bytes == least_bytes
        assert simulate(trace, costs, plan(trace, costs, budget_bytes, host_bytes=host_bytes)).offloaded_bytes == 0
    made = plan(trace, costs, budget_bytes, strategy="offload_all", host_bytes=least_bytes)
    forecast = simulate(trace, costs, made, host_bytes=least_bytes)
    assert forecast.lower_tier_bytes == 0 < forecast.disk_bytes
    by_hand = 3 * (forecast.offloaded_bytes + forecast.reloaded_bytes) / 1e9  # link and disk, and their latencies
    assert forecast.step_seconds < costs.plain_seconds + by_hand
