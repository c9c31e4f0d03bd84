"""The model's state by class in reports, against the forecast and the lifetimes. No torch."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from elbowroom.ir.costs import Costs
from elbowroom.ir.journal import Journal
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.trace import STATE_ROLES, Trace
from elbowroom.planner.problem import plan, pose
from elbowroom.report.state import count_state
from elbowroom.report.summary import summarize
from elbowroom.simulator.simulate import simulate
from tests.generators import KIB, cyclic_steps, keep_everything, make_costs, make_link
from tests.pure.test_state_planning import EFFORT, make_model
from tests.pure.test_state_simulation import draw_state

pytestmark = pytest.mark.usefixtures("small_hosts")


@given(some.data(), cyclic_steps())
@settings(max_examples=60, deadline=None)
def test_classes_add_up_to_the_forecast(data: some.DataObject, step: tuple[Trace, Costs]) -> None:
    trace, costs = step
    moved = dataclasses.replace(keep_everything(costs), state=draw_state(data, trace))
    forecast = simulate(trace, costs, moved)
    classes = count_state(trace, costs, moved, forecast)
    plain = Lifetimes(trace)
    there = [
        each for each in trace.storages if each.role in STATE_ROLES and plain.is_there(each.id, forecast.peak_tick)
    ]
    assert sum(each.device_bytes + each.host_bytes for each in classes) == sum(each.nbytes for each in there)
    assert not any(each.disk_bytes for each in classes)
    assert sum(each.offloaded_bytes for each in classes) == forecast.state_offloaded_bytes
    assert sum(each.reloaded_bytes for each in classes) == forecast.state_reloaded_bytes
    late = forecast.step_seconds - simulate(trace, costs, keep_everything(costs)).step_seconds
    assert sum(each.exposed_seconds for each in classes) == pytest.approx(late, abs=1e-12)
    link = costs.link
    moves_seconds = forecast.state_offloaded_bytes / link.out_bytes_per_second
    moves_seconds += forecast.state_reloaded_bytes / link.back_bytes_per_second
    assert sum(each.hidden_seconds + each.exposed_seconds for each in classes) >= 0.999 * moves_seconds


def test_the_tiers_and_the_seconds_of_each_class() -> None:
    trace = make_model()
    costs = make_costs(trace, op_seconds=1e-3, link=make_link(per_second=1e8))
    costs = dataclasses.replace(costs, further_links=(make_link(per_second=1e8),))
    budget_bytes = pose(trace, costs, 1).plain.peak_bytes * 3 // 5
    host_bytes = 2048 * KIB
    made = plan(trace, costs, budget_bytes, strategy=EFFORT, host_bytes=host_bytes, manages="everything")
    forecast = simulate(trace, costs, made, host_bytes=host_bytes)
    classes = count_state(trace, costs, made, forecast, host_bytes)
    away = [each for each in classes if each.host_bytes or each.disk_bytes]
    assert sum(each.host_bytes for each in away) and sum(each.disk_bytes for each in away)
    assert sum(each.host_bytes for each in away) <= host_bytes
    assert sum(each.exposed_seconds for each in classes) > 0 and sum(each.hidden_seconds for each in classes) > 0
    page = summarize(
        budget_bytes=budget_bytes, journal=Journal(steps=()), trace=trace, costs=costs, plan=made, forecast=forecast,
        manages="everything", host_bytes=host_bytes,
    )  # fmt: skip
    assert all(text in page for text in ("optimizer state", "on host", "on disk", "hidden", "exposed", "Manages every"))
    assert all(len(line) <= 80 for line in page.splitlines())
    below = dataclasses.replace(costs.link, lower="disk")  # a CPU's only tier below
    on_disk = count_state(trace, dataclasses.replace(costs, link=below, further_links=()), made, forecast)
    assert sum(each.disk_bytes for each in on_disk) == sum(each.host_bytes + each.disk_bytes for each in away)
