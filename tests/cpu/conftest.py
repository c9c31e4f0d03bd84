"""Fixtures of tests that need torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from elbowroom.ir.hardware import HardwareProfile
from tests.state_jobs import Away, sending_away


@pytest.fixture
def away(profile: HardwareProfile) -> Iterator[Away]:
    """A job whose state has left memory."""
    with sending_away(profile) as made:
        yield made
