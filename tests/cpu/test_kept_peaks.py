"""Peaks of an allocator that rooms reset to measure steps and ops, as the program and the steps read them."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest

from elbowroom.hooks.kept_peaks import READERS, RESETTERS, wrap_bindings
from elbowroom.native import library

DEVICE = "cuda:3"


class Allocator:
    """Counts the bytes of a device, behind the names of PyTorch's bindings."""

    def __init__(self) -> None:
        self.live = self.peak = 0
        self.bindings: Any = types.SimpleNamespace(
            **dict.fromkeys(READERS, lambda _: self.read()), **dict.fromkeys(RESETTERS, lambda _: self.reset())
        )

    def hold(self, *counts: int) -> None:
        for nbytes in counts:
            self.live = nbytes
            self.peak = max(nbytes, self.peak)

    def count(self) -> tuple[int, int, int, int]:
        return self.live, self.peak, self.live + 5, self.peak + 5

    def read(self) -> dict[str, Any]:
        live, peak, reserved, reserved_peak = self.count()
        return {
            "allocated_bytes": {"all": {"current": live, "peak": peak}},
            "reserved_bytes": {"all": {"current": reserved, "peak": reserved_peak}},
            "num_ooms": 0,
        }

    def reset(self) -> None:
        self.peak = self.live

    def read_peaks(self) -> set[tuple[int, int]]:
        """Pairs of peaks that the bindings return."""
        found = [getattr(self.bindings, name)(3) for name in READERS]
        return {(each["allocated_bytes"]["all"]["peak"], each["reserved_bytes"]["all"]["peak"]) for each in found}


@pytest.fixture
def allocator() -> Iterator[Allocator]:
    made, native = Allocator(), library.load()
    wrap_bindings(made.bindings)
    native.replace_device_counts(made.count, made.reset)
    yield made
    native.forget_program_peaks(DEVICE)
    native.begin_peaks(DEVICE)
    native.replace_device_counts(None, None)


def test_the_program_reads_the_highest_peak_since_it_has_reset_them(allocator: Allocator) -> None:
    native = library.load()
    for nbytes in (500, 300):  # two steps
        native.begin_peaks(DEVICE)
        allocator.hold(nbytes, 100)
    assert allocator.peak == 300 and allocator.read_peaks() == {(500, 505)}
    found = allocator.bindings._cuda_memoryStats(3)
    assert found["allocated_bytes"]["all"]["current"] == 100 and found["num_ooms"] == 0
    allocator.hold(700)
    assert allocator.read_peaks() == {(700, 705)}
    for name in RESETTERS:
        native.reset_peaks(DEVICE)
        getattr(allocator.bindings, name)(3)
        allocator.hold(90)
        allocator.reset()
        assert allocator.read_peaks() == {(90, 95)}
        allocator.hold(700)


def test_peaks_of_a_step_include_those_before_an_op_was_measured(allocator: Allocator) -> None:
    native = library.load()
    allocator.hold(900)
    allocator.hold(50)
    native.begin_peaks(DEVICE)
    allocator.hold(400, 60)
    native.reset_peaks(DEVICE)
    allocator.hold(200, 60)
    assert allocator.peak == 200
    assert list(native.find_step_peaks(DEVICE)) == [400, 405]
    native.begin_peaks(DEVICE)
    assert list(native.find_step_peaks(DEVICE)) == [0, 0] and allocator.peak == 60
    assert allocator.read_peaks() == {(900, 905)}


@pytest.mark.parametrize("name", RESETTERS)
def test_a_step_keeps_its_peak_if_the_program_resets_its_own(allocator: Allocator, name: str) -> None:
    native = library.load()
    native.begin_peaks(DEVICE)
    allocator.hold(400, 60)
    getattr(allocator.bindings, name)(3)
    assert allocator.read_peaks() == {(60, 65)}
    assert list(native.find_step_peaks(DEVICE)) == [400, 405]
