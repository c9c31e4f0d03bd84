"""Captures a step while it really runs: the same tracer, with the meter telling seconds and bytes of every op."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from elbowroom.hooks.meter import Meter
from elbowroom.ir.costs import Measurements
from elbowroom.ir.trace import Role, Storage, Trace
from elbowroom.tracing.residents import list_residents
from elbowroom.tracing.tracer import Tracer


class LiveCapture:
    """One step being captured. Enter `tracer` as a dispatch mode, and tell it of saves and needs."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        meter: Meter,
    ) -> None:
        self._model, self._optimizers, self._meter = model, optimizers, meter
        self._state_before = count_state(optimizers)
        self.tracer = Tracer(name, device, list_residents(model, optimizers), meter=meter)

    @property
    def is_settled(self) -> bool:
        """Whether the step left as much optimizer state as it found: later steps will be like it."""
        return count_state(self._optimizers) == self._state_before

    def finish(self) -> Trace:
        """The trace. The meter may be stopped afterwards."""
        return add_outside(self.tracer.finish(list_residents(self._model, self._optimizers)), self._meter.base_bytes)

    def measure(self, trace: Trace, step_seconds: float, stall_seconds: float) -> Measurements:
        """What the (stopped) meter saw of the ops of `trace`, which this step began with.

        `step_seconds`: wall time, the tracer's own included.
        """
        created = [0] * trace.end
        for storage in trace.storages:
            if storage.created >= 0:
                created[storage.created] += storage.nbytes
        # Watching keeps the host of a CUDA device far busier than a step does: its wall time says nothing of the rest.
        whole_seconds = max(0.0, step_seconds - self.tracer.own_seconds) if trace.device == "cpu" else 0.0
        return Measurements(
            op_seconds=self._meter.op_seconds()[: len(trace.ops)],
            workspace_bytes=self._meter.workspace_bytes([created[op.tick] for op in trace.ops]),
            step_seconds=whole_seconds,
            stall_seconds=stall_seconds,
        )


def add_outside(trace: Trace, base_bytes: int) -> Trace:
    """A trace that also counts what the device held before the step and no storage of it stands for.

    On CUDA that is the workspaces that cuBLAS keeps for each thread, and everywhere what else the program has there.

    Args:
        base_bytes: what was allocated when the step began.
    """
    block = 512 if trace.device == "cuda" else 1  # bytes: the caching allocator hands out multiples of it
    known_bytes = sum(-(-storage.nbytes // block) * block for storage in trace.storages if storage.created < 0)
    if base_bytes <= known_bytes:
        return trace
    outside = Storage(
        id=len(trace.storages), nbytes=base_bytes - known_bytes, role=Role.BUFFER, created=-1, released=trace.end,
        label="outside of the step",
    )  # fmt: skip
    return dataclasses.replace(trace, storages=(*trace.storages, outside))


def count_state(optimizers: Sequence[Optimizer]) -> int:
    """How many entries the optimizers' states have."""
    return sum(len(state) for optimizer in optimizers for state in optimizer.state.values())
