"""Fixtures of tests that need torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from elbowroom.errors import TraceError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.strategies import auto
from tests.state_jobs import Away, sending_away


@pytest.fixture
def away(profile: HardwareProfile) -> Iterator[Away]:
    """A job whose state has left memory."""
    with sending_away(profile) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def short_searches() -> Iterator[None]:
    """Has `auto` search with little effort, as any plan will do: tests/pure has the tests of how good plans are."""
    with pytest.MonkeyPatch.context() as patch:
        for function in (auto.make_plan, auto.make_joint_plan):
            patch.setitem(function.__kwdefaults__, "effort", 0.05)
        yield


@pytest.fixture(autouse=True)
def steady_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps plans where other work slows down a step; tests of planning again use the fixture `replans`."""
    if "replans" not in request.fixturenames:
        monkeypatch.setattr("elbowroom.cost.prediction_check.LEAST_SECONDS", math.inf)


@pytest.fixture(autouse=True)
def faults_of_the_planner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails tests in which the planner does, without which steps go on; but for those that use `tolerates_faults`."""

    def fail(error: TraceError) -> str:
        raise error

    if "tolerates_faults" not in request.fixturenames:
        for name in ("captured_steps.explain_fault", "plan_cache.explain_fault", "planner_faults.explain_fault_again"):
            monkeypatch.setattr(f"elbowroom.{name}", fail)


@pytest.fixture
def tolerates_faults() -> None:
    """Leaves it to the room what to do after a fault of the planner."""


@pytest.fixture
def no_ample_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches steps that differ from the expected one, also where much larger ones would fit."""
    monkeypatch.setattr("elbowroom.plain_step_check.AMPLE", 1 << 40)


@pytest.fixture
def plans_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans each kind of step once it recurs, also where planning takes longer than it saves."""
    monkeypatch.setattr("elbowroom.plan_cache.GAIN", 1e9)
