"""The compiled sweep is the plain simulator's twin: same peak, same seconds, for any choices and any budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import Trace
from elbowroom.planner.composer import Composer
from elbowroom.planner.problem import pose
from elbowroom.simulator.sweep import sweep
from tests.generators import jobs


@given(job=jobs(), data=some.data(), share=some.floats(0.2, 1.1), slack=some.sampled_from([0.0, 1.0]))
def test_a_sweep_is_a_replay(job: tuple[Trace, Costs], data: some.DataObject, share: float, slack: float) -> None:
    trace, costs = job
    problem = pose(trace, costs, 1, min_offload_bytes=1)
    problem = pose(trace, costs, int(problem.plain.peak_bytes * share), min_offload_bytes=1)
    composer = Composer(problem)
    choices = np.asarray(data.draw(some.lists(some.integers(0, 2), min_size=len(composer.keys),
                                              max_size=len(composer.keys))), dtype=np.int8)  # fmt: skip
    if not sweep(composer.columns, choices, problem.budget_bytes, slack, composer.room):
        return
    plan = composer.make_plan(choices, "test", slack)
    check(trace, plan)
    forecast = problem.drafter.replay.run(plan)
    outcome = composer.room.outcome[0]
    assert outcome.peak_bytes == forecast.peak_bytes
    assert outcome.seconds == pytest.approx(forecast.step_seconds, rel=1e-12)
    assert outcome.lower_bytes == forecast.lower_tier_bytes
    assert outcome.stall_seconds == pytest.approx(forecast.stall_seconds, rel=1e-9, abs=1e-15)
