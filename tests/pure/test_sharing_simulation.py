"""The broker on a virtual clock: bounds on waiting, figures by hand, and a thousand jobs. No torch."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import random
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from elbowroom._family import names
from elbowroom.errors import ElbowroomError, UsageError
from elbowroom.sharing import policies
from elbowroom.sharing.demand import Demand, FrontPoint, make_front
from elbowroom.sharing.job_list import Evaluation, JobList, load_job_list, read_job_list
from elbowroom.sharing.policies.fair import allot as allot_fairly
from elbowroom.sharing.policies.marginal import allot as allot_marginally
from elbowroom.sharing.simulation import simulate_sharing

POLICIES = names(policies)
TURNING = tuple(each for each in POLICIES if each != "queue")


def job(front: list[list[float]], steps: int = 10, arrival: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"name": "job", "front": front, "steps": steps, "arrival_seconds": arrival, **fields}


def make(device_bytes: int, *jobs: dict[str, Any]) -> JobList:
    return read_job_list({"device_bytes": device_bytes, "jobs": list(jobs)})


@st.composite
def job_lists(draw: st.DrawFn) -> JobList:
    jobs = []
    for _ in range(draw(st.integers(1, 6))):
        sizes = sorted(draw(st.sets(st.integers(1, 100), min_size=1, max_size=4)))
        seconds = sorted(draw(st.lists(st.floats(0.1, 5), min_size=len(sizes), max_size=len(sizes))), reverse=True)
        front = [[size, each, each * draw(st.floats(0, 1))] for size, each in zip(sizes, seconds, strict=True)]
        jobs.append(job(front, draw(st.integers(1, 40)), draw(st.floats(0, 50)), priority=draw(st.integers(0, 2))))
    return make(100, *jobs)


@hypothesis.settings(max_examples=200, deadline=None)
@hypothesis.example(make(100, job([[50, 1.0, 0.0]], 11), job([[51, 1.0, 0.0]], 2)), "fair", 0.5)
@hypothesis.given(job_lists(), st.sampled_from(POLICIES), st.sampled_from([0.5, 10.0]))
def test_all_jobs_end_and_none_waits_longer_than_stated(jobs: JobList, policy: str, quantum: float) -> None:
    outcome = simulate_sharing(jobs, policy, quantum_seconds=quantum)
    assert outcome.highest_bytes <= jobs.device_bytes
    assert len(outcome.jobs) == len(jobs.jobs)
    stretch = max(1, len(jobs.jobs))  # all jobs may compute at the same time
    longest_step = stretch * max(each.front[0].step_seconds for each in jobs.jobs)
    bound = len(jobs.jobs) * (quantum + 2 * longest_step)
    for listed, found in zip(jobs.jobs, outcome.jobs, strict=True):
        assert found.finish_seconds >= found.arrival_seconds + listed.plain_seconds * (1 - 1e-9)
        if policy in TURNING:
            assert found.longest_wait_seconds <= bound
    assert 1 / len(jobs.jobs) - 1e-9 <= outcome.fairness <= 1 + 1e-9


@hypothesis.given(job_lists())
def test_a_bad_time_for_the_broker_changes_no_result(jobs: JobList) -> None:
    assert simulate_sharing(jobs) == simulate_sharing(jobs)


def test_figures_by_hand() -> None:
    alone = make(100, job([[60, 2.0, 0.0], [100, 1.0, 0.0]]))
    outcome = simulate_sharing(alone)
    assert (outcome.makespan_seconds, outcome.idle_share, outcome.mean_slowdown) == (10.0, 0.0, 1.0)
    # Two jobs that each need the whole device to run at their fastest: one after the other, or side by side.
    front = [[50, 1.5, 0.0], [100, 1.0, 0.0]]
    both = make(100, job(front), job(front))
    assert simulate_sharing(both, "queue").makespan_seconds == 20.0
    assert simulate_sharing(both, "fair").makespan_seconds == pytest.approx(16.0, abs=1.0)
    assert simulate_sharing(both, "marginal").makespan_seconds == pytest.approx(15.0, abs=1.5)
    # Both compute all the time: side by side they take twice as long.
    busy = make(100, job([[50, 1.0, 1.0]]), job([[50, 1.0, 1.0]]))
    assert simulate_sharing(busy, "fair").makespan_seconds == pytest.approx(20.0)


def test_the_gain_of_shifted_steps_is_reported() -> None:
    spiky = job([[50, 1.0, 0.0]], shape=[0.2, 1.0, 0.2, 0.2])
    assert simulate_sharing(make(100, spiky, spiky)).shifted_share == pytest.approx(0.4)  # 60 together instead of 100
    assert simulate_sharing(make(100, spiky)).shifted_share == 0
    with pytest.raises(UsageError, match=r"jobs\[0\].shape"):
        make(100, job([[50, 1.0]], shape=[2]))


def test_a_job_that_evaluates_lends_bytes_and_is_not_stopped() -> None:
    first = job([[40, 2.0, 0.0], [80, 1.0, 0.0]], 10, weight=9, evaluation=[5, 20.0, 20])
    jobs = make(100, first, job([[20, 2.0, 0.0], [60, 1.0, 0.0]], 40))
    before = simulate_sharing(jobs, lends=False)
    assert before.makespan_seconds == pytest.approx(55.0, abs=1)  # the other takes twice as long for 30 s
    lending = simulate_sharing(jobs)
    assert lending.makespan_seconds == pytest.approx(45.0, abs=2)  # for 10 s, and until its step boundary
    assert lending.highest_bytes <= 100
    for outcome in (before, lending):
        assert outcome.jobs[0].finish_seconds == pytest.approx(30.0, abs=3)
        assert [each.pauses for each in outcome.jobs] == [0, 0]
    # One that needs more than was left to it keeps its lease.
    large = make(100, {**first, "evaluation": [5, 20.0, 80]}, *[job([[20, 2.0, 0.0], [60, 1.0, 0.0]], 40)])
    assert simulate_sharing(large).makespan_seconds == pytest.approx(55.0, abs=1)


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(job_lists(), st.lists(st.integers(1, 120), min_size=6, max_size=6), st.sampled_from(POLICIES))
def test_jobs_that_evaluate_end_and_stay_within_the_device(jobs: JobList, sizes: list[int], policy: str) -> None:
    evaluations = [Evaluation(steps=1 + size % 4, seconds=size / 10, nbytes=size) for size in sizes]
    listed = [
        dataclasses.replace(each, evaluation=evaluation)
        for each, evaluation in zip(jobs.jobs, evaluations, strict=False)
    ]
    outcome = simulate_sharing(dataclasses.replace(jobs, jobs=tuple(listed)), policy, quantum_seconds=2.0)
    assert outcome.highest_bytes <= jobs.device_bytes
    for each, found in zip(listed, outcome.jobs, strict=True):
        assert found.finish_seconds >= each.arrival_seconds + each.plain_seconds * (1 - 1e-9)


def test_moving_state_takes_time() -> None:
    jobs = make(100, job([[60, 1.0, 0.0]], 20), job([[60, 1.0, 0.0]], 20))
    quick = simulate_sharing(jobs, "fair", quantum_seconds=5)
    slow = simulate_sharing(
        dataclasses.replace(
            jobs, link_bytes_per_second=10.0,
            jobs=tuple(dataclasses.replace(each, state_bytes=20) for each in jobs.jobs),
        ),
        "fair", quantum_seconds=5,
    )  # fmt: skip
    pauses = sum(each.pauses for each in quick.jobs)
    assert pauses >= 3
    assert quick.makespan_seconds == pytest.approx(40.0, abs=0.1)
    assert slow.makespan_seconds >= 40 + 2 * pauses


def test_a_thousand_jobs() -> None:
    draw = random.Random(5)
    jobs = [
        job([[draw.randint(1, 20), 2.0, 0.01], [draw.randint(21, 60), 1.0, 0.01]], 5, draw.uniform(0, 500))
        for _ in range(1000)
    ]
    outcome = simulate_sharing(make(1000, *jobs), "fair")
    assert len(outcome.jobs) == 1000
    assert outcome.highest_bytes <= 1000


def demand(number: int, front: list[tuple[int, float, float]], **fields: Any) -> Demand:
    points = make_front([FrontPoint(nbytes=n, step_seconds=s, busy_seconds=b) for n, s, b in front])
    return Demand(job=number, front=points, arrival=number, **fields)


def test_bytes_go_where_they_gain_most() -> None:
    keen = demand(0, [(10, 4.0, 0.0), (50, 1.0, 0.0)])
    flat = demand(1, [(10, 1.1, 0.0), (50, 1.0, 0.0)])
    assert allot_marginally([keen, flat], 60) == {0: 50, 1: 10}
    assert allot_marginally([dataclasses.replace(keen, weight=0.01), flat], 60) == {0: 10, 1: 50}
    assert allot_fairly([keen, flat], 60) == {0: 30, 1: 30}


def test_a_busy_device_runs_fewer_jobs_that_repeat_nothing() -> None:
    jobs = [demand(number, [(10, 2.0, 2.0), (50, 1.0, 1.0)]) for number in range(5)]
    assert allot_marginally(jobs, 50) == {0: 50}
    idle = [demand(number, [(10, 2.0, 0.0), (50, 1.0, 0.0)]) for number in range(5)]
    assert allot_marginally(idle, 50) == dict.fromkeys(range(5), 10)


BAD_LISTS = {
    "no jobs": {"device_bytes": 5},
    "no device": {"jobs": []},
    "too large": {"device_bytes": 5, "jobs": [job([[6, 1.0]])]},
    "no front": {"device_bytes": 5, "jobs": [job([])]},
    "no seconds": {"device_bytes": 5, "jobs": [job([[1, 0.0]])]},
    "not a number": {"device_bytes": 5, "jobs": [job([[1, "x"]])]},
    "not finite": {"device_bytes": 5, "jobs": [job([[1, 1e999]])]},
    "no evaluation": {"device_bytes": 5, "jobs": [job([[1, 1.0]], evaluation=[5, 1.0])]},
    "no steps between evaluations": {"device_bytes": 5, "jobs": [job([[1, 1.0]], evaluation=[0, 1.0, 1])]},
    "no steps": {"device_bytes": 5, "jobs": [job([[1, 1.0]], 0)]},
    "a part of a step": {"device_bytes": 5, "jobs": [job([[1, 1.0]], 1.5)]},
    "a misspelt weight": {"device_bytes": 5, "jobs": [job([[1, 1.0]], wieght=2)]},
    "a misspelt device": {"device_bytes": 5, "link": 1e9, "jobs": []},
    "a list": [],
}


@pytest.mark.parametrize("kind", BAD_LISTS)
def test_bad_job_lists_are_named(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(BAD_LISTS[kind]))
    with pytest.raises(ElbowroomError):
        simulate_sharing(load_job_list(path))
    path.write_text("{")
    with pytest.raises(UsageError, match="not JSON"):
        load_job_list(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_job_list(tmp_path / "missing.json")
