"""Plans with limited lower tiers: host memory as a limit, and as a buffer before a disk. No torch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import Infeasible, TraceError, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison.smallest_budget import find_smallest
from elbowroom.planner.problem import list_strategies, plan, pose
from elbowroom.simulator.simulate import simulate
from tests.generators import example, jobs, make_link

pytestmark = pytest.mark.usefixtures("small_hosts")

SIMPLE = ("offload_all", "tvdnn_heuristic", "vdnn", "autoswap")


@pytest.mark.parametrize("strategy", SIMPLE)
@given(job=jobs(), share=some.floats(0.0, 1.0), host_share=some.floats(0.0, 1.1))
def test_plans_never_exceed_the_host(strategy: str, job: tuple[Trace, Costs], share: float, host_share: float) -> None:
    trace, costs = job
    free = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes = max(free.floor.peak_bytes, int(free.plain.peak_bytes * share))
    host_bytes = int(free.floor.lower_tier_bytes * host_share)
    try:
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    except Infeasible as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.budget_bytes == budget_bytes
        if refused.needed_bytes > budget_bytes:
            return
        assert refused.host_bytes == host_bytes < refused.needed_host_bytes
        assert str(refused.needed_host_bytes) in str(refused)
        host_bytes = refused.needed_host_bytes
        made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    forecast = simulate(trace, costs, made)
    assert forecast.peak_bytes <= budget_bytes
    assert forecast.lower_tier_bytes <= host_bytes


def test_infeasible_names_the_host_and_the_remedies() -> None:
    trace, costs = example()
    free = simulate(trace, costs, plan(trace, costs, 10**9, strategy="offload_all"))
    with pytest.raises(Infeasible, match="in the tier below the device") as caught:
        plan(trace, costs, 10**9, strategy="offload_all", host_bytes=free.lower_tier_bytes - 1)
    error = caught.value
    assert (error.needed_host_bytes, error.host_bytes) == (free.lower_tier_bytes, free.lower_tier_bytes - 1)
    for word in ("host_bytes", "the budget", "disk", "batch"):
        assert word in str(error)
    assert plan(trace, costs, 10**9, strategy="offload_all", host_bytes=free.lower_tier_bytes).decisions


def test_infeasible_does_not_name_the_host_if_the_device_is_too_small() -> None:
    trace, costs = example()
    floor = pose(trace, costs, 1, min_offload_bytes=1).floor
    with pytest.raises(Infeasible, match="memory budget") as caught:
        plan(trace, costs, floor.peak_bytes - 1, min_offload_bytes=1, host_bytes=0)
    assert caught.value.needed_host_bytes == 0
    assert "host_bytes" not in str(caught.value)


def test_infeasible_names_both_tiers_if_the_host_limits_the_device() -> None:
    trace, costs = example()
    floor = pose(trace, costs, 1, min_offload_bytes=1).floor
    with pytest.raises(Infeasible) as caught:
        plan(trace, costs, floor.peak_bytes, strategy="autoswap", min_offload_bytes=1, host_bytes=1000)
    assert caught.value.needed_bytes > floor.peak_bytes
    assert caught.value.needed_host_bytes == floor.lower_tier_bytes
    assert "host_bytes=1000" in str(caught.value)


def test_find_smallest_returns_a_budget_that_works_with_this_host() -> None:
    trace, costs = example()
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    floor, plain = problem.floor, problem.plain
    found = []
    for host_bytes in (None, floor.lower_tier_bytes, floor.lower_tier_bytes // 2, 0):
        for strategy in ("vdnn", "autoswap"):
            budget = find_smallest(trace, costs, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
            made = plan(trace, costs, budget, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
            assert simulate(trace, costs, made).peak_bytes <= budget
            found.append(budget)
    assert min(found) >= floor.peak_bytes and max(found) <= plain.peak_bytes


def test_find_smallest_refuses_what_plan_refuses() -> None:
    trace, costs = example()
    with pytest.raises(UsageError, match="min_offload_bytes is -1"):
        find_smallest(trace, costs, min_offload_bytes=-1)
    broken = dataclasses.replace(trace, end=1)
    with pytest.raises(TraceError):
        find_smallest(broken, costs)


def test_find_smallest_returns_the_lowest_peak_for_auto() -> None:
    trace, costs = example()
    smallest = find_smallest(trace, costs, min_offload_bytes=1)
    assert simulate(trace, costs, plan(trace, costs, smallest, min_offload_bytes=1)).peak_bytes <= smallest
    with pytest.raises(Infeasible):
        plan(trace, costs, smallest - 1, min_offload_bytes=1, slices="none")


@pytest.mark.parametrize("strategy", list_strategies())
def test_a_disk_lifts_the_host_limit(strategy: str) -> None:
    """Whatever fits with an unlimited host fits with a small one and a disk, but takes longer."""
    trace, costs = example()
    costs = dataclasses.replace(costs, further_links=(make_link(per_second=2e8),))
    free = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes = (free.floor.peak_bytes + 2 * free.plain.peak_bytes) // 3
    host_bytes = free.floor.lower_tier_bytes // 4
    try:
        plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)
    except Infeasible:
        return
    made = plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    forecast = simulate(trace, costs, made, host_bytes=host_bytes)
    assert forecast.peak_bytes <= budget_bytes
    assert forecast.lower_tier_bytes <= host_bytes
    # Without the limit the same plan has the same bytes on the device, and nothing on the disk.
    free_forecast = simulate(trace, costs, made)
    assert free_forecast.live_bytes == forecast.live_bytes
    assert (free_forecast.disk_bytes, free_forecast.step_seconds <= forecast.step_seconds) == (0, True)
    assert forecast.lower_tier_bytes + forecast.disk_bytes >= free_forecast.lower_tier_bytes


def test_auto_accounts_for_the_cost_of_the_disk() -> None:
    """With a small host, the plan made for it is faster than the plan made for an unlimited host."""
    trace, costs = example()
    costs = dataclasses.replace(costs, further_links=(make_link(per_second=2e7),))
    free = pose(trace, costs, 1, min_offload_bytes=1)
    budget_bytes, host_bytes = free.plain.peak_bytes * 6 // 10, 4096
    blind = plan(trace, costs, budget_bytes, min_offload_bytes=1)
    made = plan(trace, costs, budget_bytes, min_offload_bytes=1, host_bytes=host_bytes)
    assert simulate(trace, costs, blind, host_bytes=host_bytes).disk_bytes > 0
    ours, theirs = (simulate(trace, costs, each, host_bytes=host_bytes).step_seconds for each in (made, blind))
    assert ours < 0.5 * theirs


@pytest.mark.parametrize("wrong", [-1, 1.5, "8GiB", 1 << 63, float("nan")])
@pytest.mark.parametrize("name", ["budget_bytes", "host_bytes", "min_offload_bytes"])
def test_invalid_byte_counts_are_rejected(name: str, wrong: object) -> None:
    trace, costs = example()
    amounts = {"budget_bytes": 1 << 30, name: wrong}
    with pytest.raises(UsageError, match=name):
        plan(trace, costs, **amounts)  # type: ignore[arg-type]
