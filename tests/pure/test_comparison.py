"""Comparison of strategies, and search for the largest batch, on traces small enough for enumeration. No torch."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.errors import Infeasible, TraceError, UnknownMember, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.comparison import strategies_compared
from elbowroom.planner.comparison.batches import MOST_TRIALS, Batches, Trial, try_batches
from elbowroom.planner.comparison.strategies_compared import (
    Attempt,
    Entry,
    PlanOutcome,
    compare,
    even_out,
    find_fastest,
    find_front,
)
from elbowroom.planner.options import Manages
from elbowroom.planner.problem import plan, pose
from elbowroom.simulator.simulate import simulate
from tests.generators import (
    KIB,
    Layer,
    Optimizer,
    example,
    make_chain,
    make_costs,
    make_link,
    make_residual_net,
    make_trace,
)

STRATEGIES = ("auto", "keep_all", "offload_all")


# -- compare ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries() -> tuple[Entry, ...]:
    """Entries of three strategies within four budgets, the first of which is below the floor."""
    trace, costs = example()
    return tuple(compare(trace, costs, budgets(), STRATEGIES))


def budgets() -> tuple[int, ...]:
    problem = pose(*example(), 1)
    floor, peak = problem.floor.peak_bytes, problem.plain.peak_bytes
    return floor - 1, floor, (floor + peak) // 2, peak


def test_entries_are_ordered_by_budget(entries: tuple[Entry, ...]) -> None:
    expected = [(budget, strategy) for budget in budgets() for strategy in STRATEGIES]
    assert [(entry.budget_bytes, entry.strategy) for entry in entries] == expected


def test_entries_match_the_forecasts_of_their_plans(entries: tuple[Entry, ...]) -> None:
    trace, costs = example()
    plain = pose(trace, costs, 1).plain
    for entry in entries:
        assert entry.plain_seconds == plain.step_seconds and entry.attempt.planning_seconds > 0
        if entry.outcome is None:
            with pytest.raises(Infeasible) as caught:
                plan(trace, costs, entry.budget_bytes, strategy=entry.strategy)
            assert entry.attempt.needed_bytes == caught.value.needed_bytes > entry.budget_bytes
            continue
        forecast = simulate(trace, costs, plan(trace, costs, entry.budget_bytes, strategy=entry.strategy))
        for field in dataclasses.fields(PlanOutcome):
            assert getattr(entry.outcome, field.name) == getattr(forecast, field.name), field.name
        assert entry.attempt.needed_bytes == forecast.peak_bytes <= entry.budget_bytes
        assert entry.outcome.moved_bytes == forecast.offloaded_bytes + forecast.reloaded_bytes


def test_the_budgets_separate_the_strategies(entries: tuple[Entry, ...]) -> None:
    fits = collections.Counter((entry.budget_bytes, entry.outcome is not None) for entry in entries)
    assert [fits[budget, True] for budget in budgets()] == [0, 2, 2, 3]


def test_no_plan_beats_the_bound(entries: tuple[Entry, ...]) -> None:
    fitting = [entry for entry in entries if entry.outcome is not None]
    for entry in fitting:
        assert entry.outcome is not None
        assert entry.outcome.over(entry.bound_seconds) >= 1 - 1e-9
        assert entry.bound_seconds >= entry.plain_seconds * (1 - 1e-9)
    assert all((entry.bound_seconds == math.inf) == (entry.budget_bytes == budgets()[0]) for entry in entries)
    # If everything fits, the bound is reached.
    assert fitting[-2].outcome is not None and fitting[-2].strategy == "keep_all"
    assert fitting[-2].outcome.over(fitting[-2].bound_seconds) == pytest.approx(1)


def test_an_unknown_strategy_is_rejected_before_anything_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies_compared, "pose", None)
    with pytest.raises(UnknownMember, match="keep_all"):
        compare(*example(), [1], ["auto", "magic"])
    with pytest.raises(UsageError, match="speed"):
        compare(*example(), [1], ["auto:speed=9"])


def test_entries_are_yielded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def attempt(trace: Trace, costs: Costs, budget_bytes: int, strategy: str, **limits: int | None) -> Attempt:
        asked.append(strategy)
        return Attempt(outcome=None, needed_bytes=1, needed_host_bytes=0, planning_seconds=0.0)

    monkeypatch.setattr(strategies_compared, "attempt", attempt)
    running = compare(*example(), [10**9], STRATEGIES)
    assert next(running).strategy == asked[-1] and len(asked) == 1


def test_costs_of_another_trace_are_rejected() -> None:
    with pytest.raises(TraceError, match="costs"):
        list(compare(make_chain([KIB] * 3), example()[1], [10**9], ["auto"]))


def test_a_strategy_that_rejects_a_step_has_entries_without_outcome() -> None:
    refusing = "exact:most_gaps=0"
    found = list(compare(*example(), budgets(), [refusing, "auto"]))
    assert len(found) == 2 * len(budgets())
    for entry in found[:-2:2]:
        assert entry.strategy == refusing and entry.outcome is None and entry.attempt.needed_bytes == 0
        assert "exact is for small traces" in entry.attempt.refusal and "most_gaps is 0" in entry.attempt.refusal
    assert found[-2].outcome is not None and not found[-2].attempt.refusal, (
        "everything fits: there is nothing to refuse"
    )
    assert [entry.outcome is None for entry in found[1::2]] == [True, False, False, False]
    with pytest.raises(UsageError, match="small traces"):
        strategies_compared.attempt(*example(), budgets()[1], refusing)


def test_a_refused_entry_takes_over_the_outcome_of_a_smaller_budget() -> None:
    refused = make_entry(None, 0.0)
    refused = dataclasses.replace(
        refused, budget_bytes=100, attempt=dataclasses.replace(refused.attempt, needed_bytes=0, refusal="too large")
    )
    attempt = even_out([make_entry(50, 1.0), refused])[1].attempt
    assert attempt.outcome is not None and attempt.needed_bytes == 50 and attempt.refusal == ""


def test_a_plan_that_exceeds_the_host_does_not_fit() -> None:
    trace, costs = example()
    free = strategies_compared.attempt(trace, costs, 10**9, "offload_all")
    assert free.outcome is not None and free.needed_host_bytes == free.outcome.lower_tier_bytes > 0
    tight = strategies_compared.attempt(trace, costs, 10**9, "offload_all", host_bytes=free.needed_host_bytes - 1)
    assert tight.outcome is None and tight.needed_host_bytes == free.needed_host_bytes
    enough = strategies_compared.attempt(trace, costs, 10**9, "offload_all", host_bytes=free.needed_host_bytes)
    assert enough.outcome == free.outcome


def make_entry(peak_bytes: int | None, step_seconds: float) -> Entry:
    outcome = None if peak_bytes is None else PlanOutcome(
        peak_bytes=peak_bytes, step_seconds=step_seconds, recompute_seconds=0.0, stall_seconds=0.0,
        offloaded_bytes=0, reloaded_bytes=0, lower_tier_bytes=0,
    )  # fmt: skip
    attempt = Attempt(outcome=outcome, needed_bytes=peak_bytes or 99, needed_host_bytes=0, planning_seconds=0.0)
    return Entry(strategy="any", budget_bytes=99, plain_seconds=1.0, bound_seconds=1.0, attempt=attempt)


points = some.tuples(some.one_of(some.none(), some.integers(1, 6)), some.integers(1, 6).map(float))


@given(found=some.lists(points, max_size=12))
def test_the_front_is_pareto_optimal(found: list[tuple[int | None, float]]) -> None:
    made = [make_entry(*point) for point in found]
    front = find_front(made)
    fitting = {point for point in found if point[0] is not None}
    beaten = {
        (peak, seconds)
        for peak, seconds in fitting
        for other, faster in fitting
        if other <= peak and faster <= seconds and (other, faster) != (peak, seconds)
    }
    kept = [(entry.outcome.peak_bytes, entry.outcome.step_seconds) for entry in front if entry.outcome is not None]
    assert kept == sorted(fitting - beaten)
    fastest = find_fastest(made)
    assert (fastest is None) == (not fitting)
    if fastest is not None and fastest.outcome is not None:
        assert fastest.outcome.step_seconds == min(seconds for _, seconds in fitting)


@given(found=some.lists(some.tuples(some.none() | some.integers(1, 9), some.floats(1.0, 2.0)), min_size=1, max_size=6))
def test_after_even_out_a_larger_budget_is_never_slower(found: list[tuple[int | None, float]]) -> None:
    """Each outcome fits its own budget; entries of another strategy have no effect and do not change."""
    entries = [
        dataclasses.replace(make_entry(peak, seconds), budget_bytes=(peak or 0) + place)
        for place, (peak, seconds) in enumerate(found)
    ]
    other = dataclasses.replace(make_entry(1, 0.5), strategy="other")
    evened = even_out([*entries, other])
    assert evened[-1] == other
    by_budget = sorted(zip(evened, entries, strict=False), key=lambda pair: pair[0].budget_bytes)
    best, highest = math.inf, 0
    for after, before in by_budget:
        assert (after.budget_bytes, after.attempt.planning_seconds) == (
            before.budget_bytes,
            before.attempt.planning_seconds,
        )
        if after.outcome is None:
            assert before.outcome is None and best == math.inf
            continue
        assert after.outcome.peak_bytes <= after.budget_bytes
        assert before.outcome is None or after.outcome.step_seconds <= before.outcome.step_seconds
        assert after.outcome.step_seconds <= best and after.outcome.peak_bytes >= highest
        best, highest = after.outcome.step_seconds, after.outcome.peak_bytes


def test_over_handles_steps_without_time() -> None:
    outcome = make_entry(1, 2.0).outcome
    assert outcome is not None
    assert (outcome.over(4.0), outcome.over(0.0)) == (0.5, math.inf)
    assert dataclasses.replace(outcome, step_seconds=0.0).over(0.0) == 1.0


# -- batches ----------------------------------------------------------------------------------------------------------


class Loads:
    """Captures of a net whose storages grow with the batch; records the batches requested."""

    def __init__(self, grow: Callable[[int], int] = lambda batch: batch, smallest: int = 1) -> None:
        self.grow, self.smallest = grow, smallest
        self.asked: list[int] = []

    def __call__(self, batch: int) -> tuple[Trace, Costs]:
        self.asked.append(batch)
        if batch < self.smallest:
            raise ValueError("Expected more than 1 value per channel when training")
        trace = make_residual_net(2, self.grow(batch) * 4 * KIB)
        op_seconds = 1e-5 + 1e-6 * batch
        return trace, make_costs(trace, op_seconds=op_seconds, link=make_link(per_second=5e8))


def find_batches(loads: Loads, memory_bytes: int, **options: object) -> Batches:
    trials = tuple(try_batches(loads, memory_bytes, **{"strategy": "auto:effort=0.1"} | options))  # type: ignore[arg-type]
    return Batches(
        memory_bytes=memory_bytes, host_bytes=None, strategy="auto",
        trials=tuple(sorted(trials, key=lambda trial: trial.batch)),
    )  # fmt: skip


def fitting_by_hand(loads: Loads, memory_bytes: int, *, plain: bool) -> int:
    batch = 1
    while True:
        problem = pose(*loads(batch), memory_bytes)
        if (problem.plain if plain else problem.floor).peak_bytes > memory_bytes:
            return batch - 1
        batch += 1


@pytest.mark.parametrize(
    ("memory_bytes", "grow"),
    [
        (600 * KIB, lambda b: b),
        (600 * KIB, lambda b: b * b),
        (600 * KIB, lambda b: int(8 * b**0.5)),
        (600 * KIB, lambda b: -(-b // 4)),
        (3333 * KIB, lambda b: b * b),
    ],
    ids=["linear", "square", "root", "steps", "more memory"],
)
def test_the_largest_batch_is_found(grow: Callable[[int], int], memory_bytes: int) -> None:
    loads = Loads(grow)
    found = find_batches(loads, memory_bytes)
    assert len(set(loads.asked)) == len(loads.asked) == len(found.trials)
    assert len(loads.asked) <= MOST_TRIALS
    assert found.largest is not None and found.largest_plain is not None
    assert found.largest.batch == fitting_by_hand(Loads(grow), memory_bytes, plain=False)
    assert found.largest_plain.batch == fitting_by_hand(Loads(grow), memory_bytes, plain=True)
    assert found.largest_plain.batch < found.largest.batch
    tried = {trial.batch for trial in found.trials}
    assert {found.largest.batch + 1, found.largest_plain.batch + 1} <= tried


def test_linear_sizes_take_few_captures() -> None:
    loads = Loads()
    running = try_batches(loads, 64 << 20)
    for trial in running:
        if trial.batch > 1 and trial.planned.outcome is None:
            break
    assert loads.asked[-1] - 1 in loads.asked  # the largest and then the next one, which does not fit
    assert len(loads.asked) <= 7


def test_the_fastest_batch_has_close_neighbours() -> None:
    found = find_batches(Loads(), 8 << 20)
    assert found.fastest is not None and found.fastest_plain is not None
    rates = {trial.batch: trial.planned_rate for trial in found.trials if trial.planned.outcome is not None}
    assert found.fastest.planned_rate == max(rates.values()) > 0
    neighbours = sorted(rates)
    place = neighbours.index(found.fastest.batch)
    for other in neighbours[max(0, place - 1) : place + 2]:
        assert abs(other - found.fastest.batch) <= max(1, 0.05 * found.fastest.batch)
    # The constant time of an op makes larger plain batches faster.
    assert found.fastest_plain == found.largest_plain
    assert found.fastest.planned_rate >= found.fastest_plain.plain_rate


def test_rates_are_samples_over_seconds() -> None:
    found = find_batches(Loads(), 8 << 20)
    for trial in found.trials:
        assert trial.plain_rate == (trial.batch / trial.plain.step_seconds if trial.fits_plain else 0)
        outcome = trial.planned.outcome
        assert trial.planned_rate == (0 if outcome is None else trial.batch / outcome.step_seconds)
        assert trial.fits_plain == (trial.plain.peak_bytes <= found.memory_bytes)


def test_a_model_that_rejects_a_single_sample_starts_with_two() -> None:
    loads = Loads(smallest=2)
    found = find_batches(loads, 1000 * KIB)
    assert loads.asked[:2] == [1, 2] and found.trials[0].batch == 2
    with pytest.raises(ValueError, match="more than 1 value"):
        find_batches(Loads(smallest=3), 1000 * KIB)


def test_a_usage_error_is_not_retried() -> None:
    def load(batch: int) -> tuple[Trace, Costs]:
        raise UsageError(f"no such model, whatever the batch ({batch})")

    with pytest.raises(UsageError, match=r"\(1\)"):
        next(try_batches(load, 1000 * KIB))


def test_infeasible_if_not_even_one_sample_fits() -> None:
    with pytest.raises(Infeasible) as caught:
        find_batches(Loads(), 50 * KIB)
    assert caught.value.needed_bytes == pose(*Loads()(1), 1).floor.peak_bytes
    with pytest.raises(Infeasible, match="host_bytes"):
        find_batches(Loads(lambda batch: 4 * batch), 1000 * KIB, strategy="offload_all", host_bytes=1)


def test_the_host_limits_the_batch() -> None:
    """Offloading everything requires a host that holds everything."""
    loose = find_batches(Loads(), 1 << 20, strategy="offload_all").largest
    assert loose is not None
    host_bytes = loose.planned.needed_host_bytes // 2
    tight = find_batches(Loads(), 1 << 20, strategy="offload_all", host_bytes=host_bytes).largest
    assert tight is not None and 1 <= tight.batch < loose.batch
    assert tight.planned.needed_host_bytes <= host_bytes


def test_plans_of_a_batch_are_for_the_grouped_optimizer() -> None:
    """And the plain step for the optimizer as it is."""

    def load(group: int) -> tuple[Trace, Costs]:
        layers = range(6)
        chain = [Layer(inputs=(each - 1,), nbytes=64 * KIB, parameter_bytes=256 * KIB, keeps="io") for each in layers]
        trace = make_trace(chain, optimizer=Optimizer(group=group))
        return trace, make_costs(trace)

    whole = pose(*load(1000), 1, manages=Manages.EVERYTHING).floor.peak_bytes
    trials = try_batches(
        lambda batch: load(1000), whole - 1, strategy="auto:effort=0.02", manages="everything",
        load_grouped=lambda batch: load(1),
    )  # fmt: skip
    trial = next(trials)
    assert trial.smallest_bytes < whole <= trial.plain.peak_bytes and not trial.fits_plain
    assert trial.planned.outcome is not None and trial.planned.outcome.peak_bytes < whole


def test_keep_all_gains_nothing_over_the_plain_step() -> None:
    found = find_batches(Loads(), 1 << 20, strategy="keep_all")
    assert found.largest == found.largest_plain and found.fastest == found.fastest_plain


def test_without_trials_there_is_no_largest_batch() -> None:
    found = Batches(memory_bytes=1, host_bytes=None, strategy="auto", trials=())
    assert (found.largest, found.largest_plain, found.fastest, found.fastest_plain) == (None,) * 4


def test_trials_are_frozen() -> None:
    (first, *_) = find_batches(Loads(), 1 << 20).trials
    assert isinstance(first, Trial)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.batch = 2  # type: ignore[misc]
