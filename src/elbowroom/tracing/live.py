"""Captures a step while it runs: the same tracer, with a meter for the seconds and bytes of every op."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from elbowroom.hooks.meter import Meter
from elbowroom.ir.costs import Measurements
from elbowroom.ir.outside import note_freed, set_outside
from elbowroom.ir.trace import Op, Trace
from elbowroom.ir.updates import MARKS
from elbowroom.tracing.gathered_weights import GatheredWeights
from elbowroom.tracing.residents import list_residents
from elbowroom.tracing.tracer import Tracer


class LiveCapture:
    """Capture of one running step. `tracer` must observe its ops, saves and needs.

    Args:
        is_first: whether this is the first step of its room. On CUDA, ops then take many times as long as in later
            steps: the driver loads their kernels, and cuDNN chooses algorithms.

    Attributes:
        ops_before_call: as for `PlanCacheEntry`.
    """

    def __init__(
        self,
        name: str,
        device: torch.device,
        model: torch.nn.Module,
        optimizers: Sequence[Optimizer],
        meter: Meter,
        *,
        is_first: bool,
    ) -> None:
        self._is_cold = is_first and device.type == "cuda"
        self._model = model
        self._optimizers = optimizers
        self._meter = meter
        self._state_before = count_state(optimizers)
        self.tracer = Tracer(name, device, model, list_residents(model, optimizers), meter=meter)
        self._weights = GatheredWeights(self.tracer, model)
        self._is_called = False
        self.ops_before_call: int | None = None

    def note_call(self, *, has_gradients: bool) -> None:
        """Note that the model is called. `has_gradients`: whether autograd records that, outside of a backward pass."""
        if not self._is_called and has_gradients and not self.tracer.saves:
            self.ops_before_call = len(self.tracer.recorded.ops)
        self._is_called = True

    @property
    def is_settled(self) -> bool:
        """True if later steps will be like this one: it created no optimizer state, and its op times are typical."""
        return not self._is_cold and count_state(self._optimizers) == self._state_before

    def finish(self, *, has_slices: bool = False) -> Trace:
        """Return the trace. If the meter was stopped before, it knows what the program holds and frees in the step.

        Args:
            has_slices: whether ops ran in slices: their results may never have been in memory, so that the live bytes
                do not tell what was freed.
        """
        self._weights.close()
        trace = self.tracer.finish(list_residents(self._model, self._optimizers))
        trace = set_outside(self._weights.write_into(trace), self._meter.base_bytes)
        return trace if has_slices else note_freed(trace, self._meter.op_bytes())

    def close(self) -> None:
        """Record no more, and let go of the model. The trace is not asked for any more.

        Others keep the tracer with the state of a thread that ran the step, for as long as they live: DDP's reducer
        does, which the model holds.
        """
        self.tracer.pauses += 1
        self.tracer.origins.close()
        self.tracer.ticks.close()

    def measure(self, trace: Trace, step_seconds: float, stall_seconds: float) -> Measurements | None:
        """Return the (stopped) meter's measurements of the ops of `trace`; None if this step did not begin with them.

        Args:
            step_seconds: wall time, tracing included.
        """
        ran = self.finish()
        found = match_ops(trace.ops, ran.ops)
        if found is None:
            return None
        created = [0] * ran.end
        for storage in ran.storages:
            if storage.created >= 0:
                created[storage.created] += storage.nbytes
        # On CUDA, tracing slows the host far below the speed of a plain step, so the wall time is meaningless.
        whole_seconds = max(0.0, step_seconds - self.tracer.own_seconds) if trace.device == "cpu" else 0.0
        seconds = self._meter.op_seconds()
        workspace = self._meter.workspace_bytes([created[op.tick] for op in ran.ops])
        return Measurements(
            op_seconds=tuple(0.0 if each is None else seconds[each] for each in found),
            # A mark allocates nothing but the state that it brings back.
            workspace_bytes=tuple(0 if at is None or ran.ops[at].name in MARKS else workspace[at] for at in found),
            step_seconds=whole_seconds,
            stall_seconds=stall_seconds,
        )


def match_ops(planned: Sequence[Op], ran: Sequence[Op]) -> list[int | None] | None:
    """Match the ops of a trace with the first ops that ran.

    On fake tensors autograd makes other views, and accumulates gradients out of place: views need not match, and an op
    matches its in-place variant.

    Returns:
        The index in `ran` of each op of `planned`, None for views that did not run; None in all if another step ran.
    """
    found: list[int | None] = []
    position = 0
    for op in planned:
        if not op.writes:
            is_same = position < len(ran) and ran[position].name == op.name
        else:
            while position < len(ran) and not ran[position].writes:
                position += 1
            if position == len(ran) or _strip(ran[position].name) != _strip(op.name):
                return None
            is_same = True
        found.append(position if is_same else None)
        position += is_same
    return found


def _strip(name: str) -> str:
    return name.replace("_.", ".", 1)


def count_state(optimizers: Sequence[Optimizer]) -> int:
    """Count the entries of the optimizers' states."""
    return sum(len(state) for optimizer in optimizers for state in optimizer.state.values())


def explain_no_needs() -> str:
    """Return why a captured step needs no saved tensors."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved-tensor hooks of the program come first, so that there is nothing to plan"
    return "no backward() of a forward pass inside of the same room.step() ran there, so there is nothing to plan"
