"""`auto` is close to the optimum wherever that is known: small traces and chains."""

from __future__ import annotations

import math

import pytest

from elbowroom.errors import Infeasible
from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds.bound import find_bound
from elbowroom.planner.heuristics.revolve import revolve
from elbowroom.planner.problem import Problem, plan, pose
from tests.generators import KIB, make_chain, make_costs, make_link, make_residual_net, make_unet
from tests.oracles import ChainOracle, count_extra_forwards

SMALL: dict[str, Trace] = {
    "residual net": make_residual_net(3, 256 * KIB),
    "U-net": make_unet(4, 1024 * KIB),
    "chain": make_chain([64 * KIB, 256 * KIB, 128 * KIB, 32 * KIB] * 2, keeps="o"),
    "chain with barriers": make_chain([128 * KIB] * 9, barriers=frozenset({2, 5})),
}
SHARES = {2e8: (0.1, 0.5, 0.9), 2e9: (0.3, 0.7)}
"""By link bytes per second: budgets as shares of the way from the floor to the plain peak."""

CHAINS = (6, 17, 33)
NO_LINK = make_link(per_second=1.0)


def pose_at(trace: Trace, costs: Costs, budget_bytes: int) -> Problem:
    return pose(trace, costs, budget_bytes, min_offload_bytes=1)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("pace", SHARES)
def test_auto_is_within_one_percent_of_exact(name: str, pace: float) -> None:
    trace = SMALL[name]
    seconds = [1e-4 * (1 + index % 5) for index in range(len(trace.ops))]
    costs = make_costs(trace, op_seconds=seconds, link=make_link(per_second=pace))
    problem = pose_at(trace, costs, 1)
    floor, peak, replay = problem.floor.peak_bytes, problem.plain.peak_bytes, problem.drafter.replay
    for share in SHARES[pace]:
        budget_bytes = int(floor + share * (peak - floor))
        auto, exact = (
            replay.run(plan(trace, costs, budget_bytes, strategy=strategy, min_offload_bytes=1)).step_seconds
            for strategy in ("auto", "exact:nodes=300")
        )
        assert auto <= 1.01 * exact, (share, auto, exact)
        assert find_bound(pose_at(trace, costs, budget_bytes)).seconds <= exact * (1 + 1e-12)


@pytest.mark.parametrize("layers", CHAINS)
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_auto_is_optimal_on_unit_chains(layers: int, share: float) -> None:
    trace = make_chain([1024 * KIB] * layers)
    costs = make_costs(trace, op_seconds=1e-3, link=NO_LINK)
    peak = pose_at(trace, costs, 1).plain.peak_bytes
    problem = pose_at(trace, costs, int(share * peak))
    if problem.floor.peak_bytes > problem.budget_bytes:
        pytest.skip("below the floor")
    fewest = ChainOracle(problem).count_replays()
    optimum = problem.plain.step_seconds + 1e-3 * fewest
    bound = find_bound(problem)
    made = plan(trace, costs, problem.budget_bytes, min_offload_bytes=1)
    auto = problem.drafter.replay.run(made).step_seconds
    assert bound.seconds <= optimum * (1 + 1e-12)
    assert auto == pytest.approx(optimum, rel=1e-9)


def test_the_chain_oracle_agrees_with_exact_on_a_short_chain() -> None:
    trace = make_chain([1024 * KIB] * 6)
    costs = make_costs(trace, op_seconds=1e-3, link=NO_LINK)
    problem = pose_at(trace, costs, 1)
    floor, peak, replay = problem.floor.peak_bytes, problem.plain.peak_bytes, problem.drafter.replay
    counts = []
    for budget_bytes in range(floor, peak, 512 * KIB):
        problem = pose_at(trace, costs, budget_bytes)
        seconds = replay.run(plan(trace, costs, budget_bytes, strategy="exact", min_offload_bytes=1)).step_seconds
        fewest = ChainOracle(problem).count_replays()
        if math.isfinite(fewest):  # otherwise something must be offloaded
            assert seconds == pytest.approx(problem.plain.step_seconds + 1e-3 * fewest, rel=1e-9)
            counts.append(fewest)
    assert len(set(counts)) >= 3 and counts == sorted(counts, reverse=True)


def pose_within_slots(layers: int, slots: int) -> Problem:
    """Return a chain of equal layers with memory for `slots` activations, plus weights and their gradients."""
    trace = make_chain([1024 * KIB] * layers)
    small = 16 * KIB + 2 * 4 * KIB * layers
    return pose_at(trace, make_costs(trace, op_seconds=1e-3, link=NO_LINK), slots * 1024 * KIB + small)


@pytest.mark.parametrize(
    ("layers", "slots"), [(9, 3), (17, 3), (32, 3), (32, 4), (32, 6), *((48, slots) for slots in range(4, 9))]
)
def test_recomputation_alone_is_optimal_down_to_the_smallest_budget(layers: int, slots: int) -> None:
    """Backward holds an activation and two gradients at once, so `slots - 2` slots can hold checkpoints."""
    problem = pose_within_slots(layers, slots)
    replay = problem.drafter.replay
    fewest = count_extra_forwards(layers, slots - 2)
    # Little effort: no annealing run finds replays of replays.
    strategy = "auto:moves=recompute,effort=0.02"
    made = plan(replay.trace, replay.costs, problem.budget_bytes, strategy=strategy, min_offload_bytes=1)
    extra = (replay.run(made).step_seconds - problem.plain.step_seconds) / 1e-3
    assert ChainOracle(problem).count_replays() == fewest
    assert extra == pytest.approx(fewest, rel=1e-9)
    assert not any(decision.choice is Choice.OFFLOAD for decision in made.decisions)


def test_below_the_smallest_budget_of_a_chain_recomputation_is_infeasible() -> None:
    problem = pose_within_slots(17, 2)
    replay = problem.drafter.replay
    assert math.isinf(ChainOracle(problem).count_replays())
    with pytest.raises(Infeasible):
        plan(replay.trace, replay.costs, problem.budget_bytes, strategy="auto:moves=recompute,effort=0.02",
             min_offload_bytes=1)  # fmt: skip


def test_auto_is_no_slower_than_the_chain_schedule_at_small_budgets() -> None:
    """Stages differ in bytes and seconds; no choice vector expresses what the schedule keeps."""
    trace = make_chain([(1 + index * 7 % 11) * 128 * KIB for index in range(24)])
    costs = make_costs(trace, op_seconds=[1e-4 * (1 + index % 5) for index in range(len(trace.ops))], link=NO_LINK)
    problem = pose_at(trace, costs, 1)
    floor, peak, replay = problem.floor.peak_bytes, problem.plain.peak_bytes, problem.drafter.replay
    for share in (0.1, 0.2, 0.4):
        problem = pose_at(trace, costs, int(floor + share * (peak - floor)))
        schedule = revolve(problem)
        assert schedule is not None
        check(trace, schedule)
        made = plan(trace, costs, problem.budget_bytes, strategy="auto:moves=recompute,effort=0.1",
                    min_offload_bytes=1)  # fmt: skip
        assert replay.run(schedule).peak_bytes <= problem.budget_bytes
        assert replay.run(made).step_seconds <= replay.run(schedule).step_seconds
