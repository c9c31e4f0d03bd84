"""Measures the steps of a room, and keeps their records."""

from __future__ import annotations

import logging

import torch

from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.cuda_ledger import CudaLedger
from elbowroom.hooks.meter import Meter, make_meter
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.runtime.journal_writer import JournalWriter
from elbowroom.runtime.slice_figures import SliceFigures
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)


class Metering:
    """Measures every step of a room and keeps all records.

    Args:
        transfers: counts moved bytes and stalls.
        ledger: counts the bytes that the room holds.

    Attributes:
        budget_bytes: in force in the running step.
        largest_growth_bytes: most bytes that a step held beyond those that existed before it.
        sliced: of the ops that ran in slices.
    """

    def __init__(self, device: torch.device, transfers: Transfers, ledger: CpuLedger | CudaLedger) -> None:
        self._device = device
        self._transfers = transfers
        self._ledger = ledger
        self._journal_writer = JournalWriter()
        self._has_refused = False
        self.budget_bytes = 0
        self.largest_growth_bytes = 0
        self.sliced = SliceFigures()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._journal_writer.count

    def journal(self) -> Journal:
        """Return the records of all steps so far."""
        return self._journal_writer.journal()

    def metrics(self) -> dict[str, int | float | str]:
        """Return the figures listed in `Room.metrics`."""
        found = self._journal_writer.metrics()
        if self.sliced.counts:
            found["sliced_ops"] = sum(self.sliced.counts.values())
        return found

    def make(self, *, is_detailed: bool = False) -> Meter:
        """Return a meter for the next step. `is_detailed`: whether to measure each op."""
        transfers = self._transfers
        return make_meter(
            self._device, self._ledger, is_detailed=is_detailed, find_stall=lambda: transfers.stall_seconds
        )

    def record(self, mode: Mode, seconds: float, state: StepState | None, meter: Meter, note: str) -> StepRecord:
        """Add the record of a completed step. `state`: None for a plain step."""
        transfers = self._transfers
        record = StepRecord(
            step=self._journal_writer.count,
            mode=mode,
            seconds=seconds,
            stall_seconds=transfers.stall_seconds,
            budget_bytes=self.budget_bytes,
            peak_bytes=meter.peak_bytes or None,
            resident_bytes=meter.resident_bytes or None,
            offloaded_bytes=transfers.offloaded_bytes,
            reloaded_bytes=transfers.reloaded_bytes,
            recomputed=0 if state is None else state.recomputed,
            saves=0 if state is None else state.saved_tensors.saves,
            needs=0 if state is None else state.saved_tensors.needs,
            note=note or ("" if state is None else state.refusal),
        )
        transfers.reset_figures()
        self.largest_growth_bytes = max(self.largest_growth_bytes, meter.peak_bytes - meter.base_bytes)
        if state is not None and state.refusal and not self._has_refused:
            self._has_refused = True
            logger.warning("storages that should leave the device stay there while they fit: %s", state.refusal)
        self._journal_writer.add(record)
        return record
