"""`exact` finds the fastest of all choices, warns if it stops early, and rejects large traces."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from elbowroom.errors import UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.problem import Problem, plan, pose
from elbowroom.planner.searching.branch_and_bound import CLOSE, SLACKS, BranchAndBound
from elbowroom.simulator.compiled_loops.segments import KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN
from elbowroom.simulator.compiled_loops.sweep import sweep
from tests.generators import jobs, make_chain, make_costs, make_link, make_residual_net

TRIED = (KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN)
MOST_VECTORS = 1024


def pose_between(job: tuple[Trace, Costs], share: float) -> Problem:
    """Return a problem with a budget at this share of the way from the floor to the peak."""
    problem = pose(*job, 1, min_offload_bytes=1)
    floor, peak = problem.floor.peak_bytes, problem.plain.peak_bytes
    return pose(*job, int(floor + share * (peak - floor)), min_offload_bytes=1)


def try_every_vector(problem: Problem, brancher: BranchAndBound) -> float:
    """Return the seconds of the fastest choice vector over the gaps to decide on."""
    vectors, fastest = brancher.vectors, math.inf
    choices = np.zeros(len(vectors.keys), dtype=np.int8)
    for vector in itertools.product(TRIED, repeat=len(brancher.gaps)):
        choices[brancher.gaps] = vector
        for slack in SLACKS:
            if sweep(vectors.columns, choices, problem.budget_bytes, slack, np.inf, vectors.room):
                outcome = vectors.room.outcome[0]
                if outcome.peak_bytes <= problem.budget_bytes:
                    fastest = min(fastest, float(outcome.seconds))
    return fastest


@given(job=jobs(), share=some.floats(0.0, 0.99))
@settings(max_examples=30)
def test_pruned_branches_contain_nothing_faster(job: tuple[Trace, Costs], share: float) -> None:
    problem = pose_between(job, share)
    assume(not problem.fits(problem.plain))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("elbowroom.planner.searching.branch_and_bound.FEW_VECTORS", 4)  # so that it branches
        brancher = BranchAndBound(problem)
        assume(0 < len(TRIED) ** len(brancher.gaps) <= MOST_VECTORS)
        found = brancher.search(10_000)
    assert found.choices is not None and found.bound_seconds == found.seconds
    fastest = try_every_vector(problem, brancher)
    assert fastest <= found.seconds * (1 + 1e-12) and found.seconds * (1 - 2 * CLOSE) <= fastest
    made = brancher.vectors.make_plan(found.choices, "test", found.slack)
    forecast = problem.drafter.replay.run(made)
    assert problem.fits(forecast) and forecast.step_seconds <= found.seconds * (1 + 1e-12)


def test_an_early_stop_is_logged_with_the_gap(caplog: pytest.LogCaptureFixture) -> None:
    trace = make_residual_net(2, 1 << 18)
    job = trace, make_costs(trace, op_seconds=1e-4, link=make_link(per_second=5e8))
    problem = pose_between(job, 0.4)
    brancher = BranchAndBound(problem)
    early, late = brancher.search(1), BranchAndBound(problem).search(400)
    assert early.nodes == 1
    assert early.bound_seconds < late.bound_seconds == late.seconds < early.seconds and late.nodes < 400
    with caplog.at_level(logging.WARNING):
        plan(*job, problem.budget_bytes, strategy="exact:nodes=1", min_offload_bytes=1)
    assert "stopped after 1 nodes" in caplog.text and "%" in caplog.text


def test_a_large_trace_is_rejected_in_favour_of_auto() -> None:
    trace = make_chain([1 << 16] * 80)
    problem = pose_between((trace, make_costs(trace)), 0.3)
    with pytest.raises(UsageError, match=r"\d+ gaps .* most_gaps is 64; use auto") as caught:
        plan(trace, make_costs(trace), problem.budget_bytes, strategy="exact", min_offload_bytes=1)
    assert str(problem.budget_bytes) in str(caught.value)
    with pytest.raises(UsageError, match="most_gaps is 5"):
        plan(trace, make_costs(trace), problem.budget_bytes, strategy="exact:most_gaps=5", min_offload_bytes=1)
