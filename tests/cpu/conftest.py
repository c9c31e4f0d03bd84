"""Fixtures of tests that need torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import Away, sending_away


@pytest.fixture
def away(profile: HardwareProfile) -> Iterator[Away]:
    """A job whose state has left memory."""
    with sending_away(profile) as made:
        yield made


@pytest.fixture(autouse=True)
def steady_plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps plans where other work slows down a step; tests of planning again use the fixture `replans`."""
    if "replans" not in request.fixturenames:
        monkeypatch.setattr("elbowroom.cost.prediction_check.LEAST_SECONDS", math.inf)
