"""Which steps of a room are metered, and the record that each step leaves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

import torch

from elbowroom.config import Config
from elbowroom.hooks.meter import Meter, make_meter
from elbowroom.ir.journal import Journal, Mode, StepRecord
from elbowroom.ir.trace import Role, Trace
from elbowroom.runtime.logbook import Logbook
from elbowroom.runtime.online_engine import OnlineEngine
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)

SETTLED_STEPS = 2
"""Settled steps that are metered before only one in `meter_every` is."""


class Metering:
    """Meters some steps of a room and keeps the records of all.

    A meter costs time: on a CPU it runs PyTorch's profiler. So steps are metered until they have settled, and then one
    in `meter_every`, with the step before it.

    Args:
        model: whose gradients tell whether a step begins with any.
        transfers: counts moved bytes and stalls.
        config: of the room; says how often a step is metered.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        transfers: Transfers,
        config: Config,
    ) -> None:
        self._model, self._device, self._transfers = model, device, transfers
        self._config = config
        self._logbook = Logbook()
        self._was_metered = False
        self._is_blind = False  # frees gradients of a step that was not metered
        self._has_refused = False

    @property
    def steps(self) -> int:
        """Steps so far."""
        return self._logbook.count

    def journal(self) -> Journal:
        """Return the records of all steps so far."""
        return self._logbook.journal()

    def make_if_due(self, *, is_wanted: bool = False) -> Meter | None:
        """Return a meter if the next step is to be metered, else None.

        Args:
            is_wanted: whether the step is measured in any case.
        """
        every = self._config.meter_every
        # The one before it, too: its gradients are freed in the next.
        is_due = every > 0 and (self._logbook.settled_steps < SETTLED_STEPS or (self._logbook.count + 1) % every < 2)
        return make_meter(self._device) if is_wanted or is_due else None

    def start(
        self,
        meter: Meter,
        residents: Iterable[torch.Tensor],
        trace: Trace | None,
        engine: OnlineEngine | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Let a meter count until the stack unwinds.

        Args:
            residents: the tensors that are there before the step.
            trace: of a step whose inputs are as large as this one's.
        """
        has_gradients = any(each.grad is not None for each in self._model.parameters())
        self._is_blind = has_gradients and not self._was_metered and self._device.type == "cpu"
        storages = () if trace is None else trace.storages
        inputs = sum(storage.nbytes for storage in storages if storage.created < 0 and storage.role is Role.INPUT)
        meter.start(residents, inputs)
        if engine is not None:
            stack.enter_context(engine.historian.learning(meter))  # once it has stopped
        stack.callback(meter.stop)

    def record(
        self, mode: Mode, seconds: float, engine: OnlineEngine | None, meter: Meter | None, note: str
    ) -> StepRecord:
        """Add the record of a step that is over."""
        transfers = self._transfers
        record = StepRecord(
            step=self._logbook.count,
            mode=mode,
            seconds=seconds,
            stall_seconds=transfers.stall_seconds,
            peak_bytes=None if meter is None or self._is_blind else meter.peak_bytes or None,
            resident_bytes=None if meter is None else meter.resident_bytes or None,
            offloaded_bytes=transfers.offloaded_bytes,
            reloaded_bytes=transfers.reloaded_bytes,
            recomputed=0 if engine is None else engine.recomputed,
            saves=0 if engine is None else engine.saves,
            needs=0 if engine is None else engine.needs,
            note=note or ("" if engine is None else engine.refusal),
        )
        transfers.stall_seconds = 0.0
        transfers.offloaded_bytes = 0
        transfers.reloaded_bytes = 0
        if engine is not None and engine.refusal and not self._has_refused:
            self._has_refused = True
            logger.warning("what should leave the device stays there, as far as there is room: %s", engine.refusal)
        self._was_metered = meter is not None
        self._logbook.add(record)
        return record
