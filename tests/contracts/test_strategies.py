"""Contract of every strategy, for any trace, machine and budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.errors import Infeasible
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import list_strategies, plan
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.simulate import simulate
from tests.generators import Layer, jobs, keep_everything, make_costs, make_trace
from tests.oracles import follow

STRATEGIES = list_strategies()
SLOW = {"auto", "checkmate", "exact", "home_pso", "tvdnn_ilp"}
QUICK = [name for name in STRATEGIES if name not in SLOW]
shares = some.floats(0.0, 1.1)


def plan_somehow(trace: Trace, costs: Costs, budget_bytes: int, strategy: str) -> tuple[Plan, int]:
    """Return a plan within the budget, or within the budget that Infeasible states; and that budget."""
    for _ in range(3):
        try:
            return plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1), budget_bytes
        except Infeasible as error:
            infeasible = error
        assert infeasible.budget_bytes == budget_bytes < infeasible.needed_bytes
        budget_bytes = infeasible.needed_bytes
    raise AssertionError(f"{strategy} finds no plan within the budget that it states")


def test_the_basic_strategies_are_listed() -> None:
    assert {"auto", "keep_all", "offload_all", "recompute_all"} <= set(STRATEGIES)


@pytest.mark.parametrize("strategy", QUICK)
@given(job=jobs(), share=shares)
def test_plans_are_valid_fit_and_repeat(strategy: str, job: tuple[Trace, Costs], share: float) -> None:
    expect_valid_plans(strategy, *job, share)


@pytest.mark.parametrize("strategy", sorted(SLOW))
@settings(max_examples=12)
@given(job=jobs(), share=shares)
def test_plans_of_searches_are_valid_fit_and_repeat(strategy: str, job: tuple[Trace, Costs], share: float) -> None:
    expect_valid_plans(strategy, *job, share)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("share", [0.0, 0.9, 1.0])
def test_a_step_without_saves(strategy: str, share: float) -> None:
    trace = make_trace([Layer(inputs=(-1,), nbytes=1024, keeps=""), Layer(inputs=(0,), nbytes=1024, keeps="")])
    expect_valid_plans(strategy, trace, make_costs(trace), share)


def expect_valid_plans(strategy: str, trace: Trace, costs: Costs, share: float) -> None:
    """Assert that plans pass the check, fit the budget in the simulator, and are deterministic."""
    check_trace(trace)
    plain = simulate(trace, costs, keep_everything(costs))
    made, budget_bytes = plan_somehow(trace, costs, max(1, int(plain.peak_bytes * share)), strategy)
    check(trace, made)
    forecast = simulate(trace, costs, made)
    assert forecast.peak_bytes <= budget_bytes
    assert (made.strategy, made.budget_bytes, made.trace_digest) == (strategy, budget_bytes, costs.trace_digest)
    assert forecast.step_seconds >= plain.step_seconds - 1e-12
    follow(trace, Machine(plan_policy.Policy(plan_policy.list_moves(made)), made.segments))
    again = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    assert again == made


@settings(max_examples=25)
@given(job=jobs(), share=some.floats(0.4, 1.0))
def test_auto_is_never_slower_than_the_quick_strategies(job: tuple[Trace, Costs], share: float) -> None:
    trace, costs = job
    plain = simulate(trace, costs, keep_everything(costs))
    made, budget_bytes = plan_somehow(trace, costs, max(1, int(plain.peak_bytes * share)), "auto")
    seconds = simulate(trace, costs, made).step_seconds
    for strategy in QUICK:
        try:
            other = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
        except Infeasible:
            continue
        assert seconds <= simulate(trace, costs, other).step_seconds * 1.005, strategy


@settings(max_examples=12)
@given(job=jobs())
def test_no_strategy_plans_below_the_smallest_budget(job: tuple[Trace, Costs]) -> None:
    trace, costs = job
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, 1, min_offload_bytes=1)
    needed_bytes = caught.value.needed_bytes
    for strategy in STRATEGIES:
        with pytest.raises(Infeasible):
            plan(trace, costs, needed_bytes - 1, strategy=strategy, min_offload_bytes=1)
    assert simulate(trace, costs, plan(trace, costs, needed_bytes, min_offload_bytes=1)).peak_bytes <= needed_bytes
