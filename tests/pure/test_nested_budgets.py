"""More memory or more kinds of moves never give a slower plan: device, host, disk, offload and recompute."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import plan, pose
from elbowroom.simulator.host_overflow import find_overflow
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, jobs, make_costs, make_link, make_residual_net

pytestmark = pytest.mark.usefixtures("small_hosts")

QUICK = "effort=0.02"
"""Guarantees that hold by construction hold for any search effort."""

EXACT = 1 + 1e-9

TRACE = make_residual_net(16, 256 * KIB)
COSTS = make_costs(TRACE, op_seconds=1e-3, link=make_link(per_second=1e9))


def seconds_within(trace: Trace, costs: Costs, budget: int, strategy: str, host_bytes: int | None = None) -> float:
    """Return the step time of the plan; infinite if there is none."""
    try:
        made = plan(trace, costs, budget, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    except Infeasible:
        return math.inf
    return simulate(trace, costs, made, host_bytes=host_bytes).step_seconds


def place_between(job: tuple[Trace, Costs], share: float) -> tuple[int, int]:
    """Return a budget at this share from the smallest to the plain peak, and the host bytes to offload everything."""
    problem = pose(*job, 1, min_offload_bytes=1)
    low, high = problem.floor.peak_bytes, problem.plain.peak_bytes
    return low + int(share * (high - low)), problem.floor.lower_tier_bytes


@settings(max_examples=12)
@given(job=jobs(disk=True), share=some.floats(0.0, 1.0), host_share=some.none() | some.floats(0.0, 1.1))
def test_both_kinds_of_moves_are_never_slower_than_one(
    job: tuple[Trace, Costs], share: float, host_share: float | None
) -> None:
    trace, costs = job
    budget, below_bytes = place_between(job, share)
    host_bytes = None if host_share is None else int(host_share * below_bytes)
    for each in (costs, dataclasses.replace(costs, further_links=())):
        both = seconds_within(trace, each, budget, f"auto:{QUICK}", host_bytes)
        for moves in ("recompute", "offload"):
            assert both <= seconds_within(trace, each, budget, f"auto:moves={moves},{QUICK}", host_bytes) * EXACT


@settings(max_examples=12)
@given(job=jobs(disk=True), share=some.floats(0.0, 1.0), host_share=some.floats(0.0, 1.1))
def test_a_disk_behind_a_host_is_never_slower_than_that_host(
    job: tuple[Trace, Costs], share: float, host_share: float
) -> None:
    trace, costs = job
    budget, below_bytes = place_between(job, share)
    host_bytes = max(count_least_host_bytes(), int(host_share * below_bytes))
    overflow = find_overflow(costs, host_bytes)
    assert overflow is not None
    with_disk = seconds_within(trace, costs, budget, f"auto:{QUICK}", host_bytes)
    without = dataclasses.replace(costs, further_links=())
    assert with_disk < math.inf
    assert with_disk <= seconds_within(trace, without, budget, f"auto:{QUICK}", overflow.host_room_bytes) * EXACT


@settings(max_examples=12)
@given(job=jobs(), share=some.floats(0.0, 1.0), hosts=some.lists(some.floats(0.0, 1.0), min_size=2, max_size=4))
def test_a_larger_host_is_never_slower(job: tuple[Trace, Costs], share: float, hosts: list[float]) -> None:
    trace, costs = job
    budget, below_bytes = place_between(job, share)
    sizes = sorted(int(each * below_bytes) for each in hosts)
    found = [seconds_within(trace, costs, budget, f"auto:{QUICK}", host_bytes) for host_bytes in sizes]
    assert all(more <= less * EXACT for less, more in itertools.pairwise(found))


@settings(max_examples=12)
@given(job=jobs(disk=True), hosts=some.lists(some.floats(0.0, 1.2), min_size=2, max_size=2))
def test_a_plan_with_host_bytes_takes_the_same_time_with_a_larger_host(
    job: tuple[Trace, Costs], hosts: list[float]
) -> None:
    trace, costs = job
    _, below_bytes = place_between(job, 0.0)
    less, more = sorted(max(count_least_host_bytes(), int(each * below_bytes)) for each in hosts)
    made = plan(trace, costs, place_between(job, 0.3)[0], strategy="offload_all", min_offload_bytes=1)
    limited = dataclasses.replace(made, host_bytes=less)
    expected = simulate(trace, costs, made, host_bytes=less)
    for host_bytes in (less, more, None):
        assert simulate(trace, costs, limited, host_bytes=host_bytes) == expected
    assert simulate(trace, costs, dataclasses.replace(made, host_bytes=more), host_bytes=less) == expected
    by_plan, by_host = (PreparedTrace(trace, costs, host_bytes=host_bytes) for host_bytes in (more, less))
    assert by_plan.place(limited) == by_host.place(made)


def test_an_empty_host_is_as_fast_as_recomputation_alone() -> None:
    budget, _ = place_between((TRACE, COSTS), 0.05)
    alone = seconds_within(TRACE, COSTS, budget, f"auto:moves=recompute,{QUICK}")
    assert alone < math.inf
    assert seconds_within(TRACE, COSTS, budget, f"auto:{QUICK}", 1) == alone


@pytest.mark.parametrize(("strategy", "host_bytes"), [(f"auto:{QUICK}", 1), (f"auto:moves=recompute,{QUICK}", None)])
def test_infeasible_states_budgets_that_work(strategy: str, host_bytes: int | None) -> None:
    budget, below_bytes = place_between((TRACE, COSTS), 0.0)
    with pytest.raises(Infeasible) as caught:
        plan(TRACE, COSTS, budget, strategy=strategy, min_offload_bytes=1, host_bytes=host_bytes)
    needed_bytes = caught.value.needed_bytes
    assert budget < needed_bytes < pose(TRACE, COSTS, 1).plain.peak_bytes / 4
    assert seconds_within(TRACE, COSTS, needed_bytes, strategy, host_bytes) < math.inf
    if host_bytes is not None:
        assert caught.value.needed_host_bytes == below_bytes
        assert seconds_within(TRACE, COSTS, budget, strategy, below_bytes) < math.inf
