"""Plans for several budgets: a larger budget is never slower, a smaller one never has a higher peak."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison.frontier import choose, plan_all
from elbowroom.planner.problem import pose
from elbowroom.simulator.replay import simulate
from tests.generators import jobs, make_costs, make_link, make_unet

results = some.none() | some.tuples(some.integers(0, 20), some.sampled_from([1.0, 2.0, 3.0]))


@given(found=some.lists(results, max_size=8), budgets=some.lists(some.integers(0, 25), max_size=8))
def test_each_budget_gets_the_fastest_result_that_fits(
    found: list[tuple[int, float] | None], budgets: list[int]
) -> None:
    chosen = choose(found, budgets)
    for budget, place in zip(budgets, chosen, strict=True):
        fitting = [result for result in found if result is not None and result[0] <= budget]
        if not fitting:
            assert place is None
        else:
            assert place is not None
            assert found[place] == min(fitting, key=lambda result: (result[1], result[0]))


@given(job=jobs(), shares=some.lists(some.floats(0.0, 1.1), min_size=2, max_size=4))
def test_a_larger_budget_is_never_slower(job: tuple[Trace, Costs], shares: list[float]) -> None:
    trace, costs = job
    peak_bytes = pose(trace, costs, 1).plain.peak_bytes
    budgets = sorted(int(peak_bytes * share) for share in shares)
    seconds, highest = float("inf"), 0
    (made,) = plan_all(trace, costs, budgets, strategy="home_pso:particles=4,generations=2")
    for budget, plan in zip(budgets, made, strict=True):
        if plan is None:
            assert seconds == float("inf")
            continue
        check(trace, plan)
        forecast = simulate(trace, costs, plan)
        assert plan.budget_bytes == budget >= forecast.peak_bytes >= highest
        assert forecast.step_seconds <= seconds
        seconds, highest = forecast.step_seconds, forecast.peak_bytes


def test_a_budget_below_the_floor_has_no_plan() -> None:
    trace = make_unet(2, 1 << 16)
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e9))
    floor_bytes = pose(trace, costs, 1).floor.peak_bytes
    (made,) = plan_all(trace, costs, [floor_bytes - 1, floor_bytes])
    assert made[0] is None and made[1] is not None
