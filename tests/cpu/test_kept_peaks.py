"""Peaks of an allocator that a room's meter resets in each step, as the program reads them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from elbowroom.hooks.kept_peaks import READERS, RESETTERS, KeptPeaks
from elbowroom.hooks.ledger import CudaLedger


class Allocator:
    """Counts bytes of two devices, behind the names of PyTorch's bindings."""

    def __init__(self) -> None:
        self.live, self.peaks = [0, 0], [0, 0]

    def hold(self, device: int, nbytes: int) -> None:
        self.live[device] = nbytes
        self.peaks[device] = max(nbytes, self.peaks[device])

    def read(self, device: int) -> dict[str, Any]:
        counts = {"current": self.live[device], "peak": self.peaks[device]}
        return {"allocated_bytes": {"all": dict(counts)}, "reserved_bytes": {"all": dict(counts)}, "num_ooms": 0}

    def reset(self, device: int) -> None:
        self.peaks[device] = self.live[device]

    def make_bindings(self) -> Any:
        readers = dict.fromkeys(READERS, self.read)
        return types.SimpleNamespace(**readers, **dict.fromkeys(RESETTERS, self.reset))


def read_peak(bindings: Any, device: int) -> list[int]:
    return [getattr(bindings, name)(device)["allocated_bytes"]["all"]["peak"] for name in READERS]


def test_the_program_reads_the_highest_peak_since_it_has_reset_them() -> None:
    allocator = Allocator()
    bindings = allocator.make_bindings()
    kept = KeptPeaks(bindings)
    for nbytes in (500, 300):  # two steps
        kept.reset(0, {"allocated_bytes": allocator.peaks[0], "reserved_bytes": allocator.peaks[0]})
        allocator.hold(0, nbytes)
        allocator.hold(0, 100)
    assert allocator.peaks[0] == 300 and read_peak(bindings, 0) == [500, 500]
    assert bindings._cuda_memoryStats(0)["allocated_bytes"]["all"]["current"] == 100
    assert bindings._cuda_memoryStats(0)["num_ooms"] == 0
    allocator.hold(0, 700)
    assert read_peak(bindings, 0) == [700, 700]
    allocator.hold(1, 50)
    assert read_peak(bindings, 1) == [50, 50]
    allocator.hold(0, 100)
    for name in RESETTERS:
        kept.reset(0, {"allocated_bytes": 700})
        getattr(bindings, name)(0)
        assert read_peak(bindings, 0) == [100, 100]


def test_a_ledger_keeps_what_its_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator()
    bindings = allocator.make_bindings()
    kept = KeptPeaks(bindings)
    monkeypatch.setattr("elbowroom.hooks.ledger.keep_peaks", lambda: kept)
    ledger = object.__new__(CudaLedger)
    ledger._device = torch.device("cuda", 1)
    monkeypatch.setattr(CudaLedger, "count_bytes", lambda _: (10, 800, 20, 900))
    ledger.reset_peaks()
    found = bindings._cuda_memoryStats(1)
    assert [found[name]["all"]["peak"] for name in ("allocated_bytes", "reserved_bytes")] == [800, 900]
