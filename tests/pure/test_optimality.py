"""`auto` is near the best there is, wherever the best can be known: small traces, and chains."""

from __future__ import annotations

import functools
import math

import pytest

from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.bounds import find_bound
from elbowroom.planner.problem import Problem, plan, pose
from tests.generators import KIB, make_chain, make_costs, make_link, make_residual_net, make_unet

SMALL: dict[str, Trace] = {
    "residual net": make_residual_net(3, 256 * KIB),
    "U-net": make_unet(4, 1024 * KIB),
    "chain": make_chain([64 * KIB, 256 * KIB, 128 * KIB, 32 * KIB] * 2, keeps="o"),
    "chain with barriers": make_chain([128 * KIB] * 9, barriers=frozenset({2, 5})),
}
SHARES = {2e8: (0.1, 0.5, 0.9), 2e9: (0.3, 0.7)}
"""Of the way from the floor to the plain peak, by bytes a second."""

CHAINS = (6, 9, 17, 33)
NO_LINK = make_link(per_second=1.0)


def pose_at(trace: Trace, costs: Costs, budget_bytes: int) -> Problem:
    return pose(trace, costs, budget_bytes, min_offload_bytes=1)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("pace", SHARES)
def test_auto_is_within_a_hundredth_of_exact(name: str, pace: float) -> None:
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


class ChainOracle:
    """How many ops a chain of equal layers replays at the least.

    Activation k is made of k - 1 by one op, and 0 is there. Backward wants the last, the one before it, and so on. What
    is not held when it is wanted is replayed from the nearest below, and any made on the way may be held from then on.

    Source: A. Griewank, A. Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000, for
    the recursion. Ours: the room at each tick is what the plain step leaves of the budget there.

    Cost: to the fourth power of the layers.
    """

    def __init__(self, problem: Problem) -> None:
        gaps = sorted(problem.drafter.gaps.values(), key=lambda gap: -gap.closes)
        self.count = len(gaps)
        self._opens, self._wants = [-1, *(gap.opens for gap in gaps)], [-1, *(gap.closes for gap in gaps)]
        self._unit = int(problem.drafter.replay.rounded[gaps[0].storage])
        self._live, self._budget_bytes = problem.plain.live_bytes, problem.budget_bytes
        ends = [len(self._live), *self._wants[1:]]
        self._at_want = [0] + [self._count_room(self._wants[k], self._wants[k] + 1) for k in range(1, self.count + 1)]
        self._until_next = [0] + [self._count_room(self._wants[k], ends[k - 1]) for k in range(1, self.count + 1)]
        self._before = self._count_room(0, self._wants[-1])

    def _count_room(self, begin: int, end: int) -> int:
        """How many activations that are not in use may be held at all of these ticks."""
        idle = [sum(self._opens[k] < tick < self._wants[k] for k in range(1, self.count + 1)) for tick in range(end)]
        others = max(self._live[tick] - self._unit * idle[tick] for tick in range(begin, end))
        return (self._budget_bytes - others) // self._unit

    @functools.cache  # noqa: B019
    def count_replays(self, low: int = 0, held: int = 0) -> float:
        """In the whole step, if the forward pass has held so many up to `low`, and holds others after that."""
        if held > self._before:
            return math.inf
        further = (
            self.count_replays(k, held + 1) + self._serve(k, held) + self._replay_all(low, k - 1, held)
            for k in range(low + 1, self.count + 1)
        )
        return min([self._replay_all(low, self.count, held), *further])

    def _serve(self, wanted: int, held: int) -> float:
        """For what is there, if there is room for it and those held below it."""
        return 0.0 if held <= self._until_next[wanted] else math.inf

    @functools.cache  # noqa: B019
    def _replay_all(self, low: int, high: int, held: int) -> float:
        """For the wants from `high` to above `low`, which is there; none between is."""
        return 0.0 if high <= low else high - low + self._hold(low, high, held)

    @functools.cache  # noqa: B019
    def _hold(self, low: int, high: int, held: int) -> float:
        """After the replay of `high` itself, which is under way and holds nothing above `low` so far."""
        between = 0 if high - low == 1 else 1  # what `high` is made of
        fits = held + between <= self._at_want[high]
        last = self._serve(high, held) + self._replay_all(low, high - 1, held) if fits else math.inf
        further = (
            self._hold(k, high, held + 1) + self._serve(k, held) + self._replay_all(low, k - 1, held)
            for k in range(low + 1, high)
        )
        return min([last, *further])


@pytest.mark.parametrize("layers", CHAINS)
@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_on_unit_chains_auto_is_the_optimum(layers: int, share: float) -> None:
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


def test_the_oracle_of_chains_is_right_where_everything_can_be_tried() -> None:
    trace = make_chain([1024 * KIB] * 6)
    costs = make_costs(trace, op_seconds=1e-3, link=NO_LINK)
    problem = pose_at(trace, costs, 1)
    floor, peak, replay = problem.floor.peak_bytes, problem.plain.peak_bytes, problem.drafter.replay
    counts = []
    for budget_bytes in range(floor, peak, 512 * KIB):
        problem = pose_at(trace, costs, budget_bytes)
        seconds = replay.run(plan(trace, costs, budget_bytes, strategy="exact", min_offload_bytes=1)).step_seconds
        fewest = ChainOracle(problem).count_replays()
        if math.isfinite(fewest):  # else some of it must be offloaded
            assert seconds == pytest.approx(problem.plain.step_seconds + 1e-3 * fewest, rel=1e-9)
            counts.append(fewest)
    assert len(set(counts)) >= 3 and counts == sorted(counts, reverse=True)
