"""Limits of overlapping steps on one device."""

from __future__ import annotations

import types

import pytest
import torch

from elbowroom.hooks.memory_fractions import MemoryFractions


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """All fractions that were in force, the last one now."""
    found = [0.9]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=100))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: found[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: found.append(share))
    return found


def test_the_lowest_limit_holds_until_its_step_ends(in_force: list[float]) -> None:
    fractions = MemoryFractions("cuda:0")
    for step, nbytes in (("one", 50), ("other", 30)):
        assert fractions.enter(step)
        fractions.limit(step, nbytes, is_lifted=False)
    fractions.leave("one")
    assert in_force == [0.9, 0.5, 0.3]
    fractions.limit("one", 10, is_lifted=False)  # it has ended
    fractions.leave("other")
    assert in_force == [0.9, 0.5, 0.3, 0.9]


def test_a_lifted_limit_lifts_those_of_other_steps(in_force: list[float]) -> None:
    fractions = MemoryFractions("cuda:0")
    for step in ("one", "other"):
        fractions.enter(step)
        fractions.limit(step, 50, is_lifted=False)
    fractions.limit("one", 50, is_lifted=True)
    fractions.leave("one")
    assert in_force == [0.9, 0.5, 0.9, 0.5]


def test_a_step_that_limits_nothing_leaves_the_program_its_change(in_force: list[float]) -> None:
    fractions = MemoryFractions("cuda:0")
    fractions.enter("one")
    in_force.append(0.4)
    fractions.leave("one")
    assert in_force == [0.9, 0.4]


def test_an_allocator_without_fractions_is_not_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object) -> float:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", refuse)
    fractions = MemoryFractions("cuda:0")
    assert not fractions.enter("one")
    fractions.leave("one")
