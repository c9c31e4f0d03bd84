"""Each budget gets the best that fits of the plans found for several budgets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from elbowroom.planner.comparison.frontier import choose

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
