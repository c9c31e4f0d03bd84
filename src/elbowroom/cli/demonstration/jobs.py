"""Trains one model of the demo, plain or within a budget, in its own process. Only this part imports torch."""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from elbowroom.cli.sources import build, default_device
from elbowroom.cli.terminal import Advance, Terminal
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.report.steady import find_steady
from elbowroom.units import format_seconds

if TYPE_CHECKING:
    import torch

    from elbowroom.workloads import Workload

LEAST_STEPS = 5
"""Within a budget two steps are captured, two are metered op by op, and one at least must be as steps are then."""

SETTLING_STEPS = 2
"""The first step creates the optimizer's state; the second warms caches."""

_NO_LIMIT_BYTES = 1 << 62


def run_plain(
    terminal: Terminal,
    spec: str,
    options: dict[str, Any],
    steps: int,
    profile: HardwareProfile,
    *,
    patience_seconds: float,
    floor: bool,
) -> dict[str, Any]:
    """Train with PyTorch alone.

    Args:
        steps: maximum number of steps; fewer, but at least `LEAST_STEPS`, if they take too long.
        patience_seconds: limit on the time of all steps.
        floor: whether to capture one step afterwards, to find the smallest feasible budget.

    Returns:
        losses (hexadecimal), seconds per step, peak_bytes of the last step, resident_bytes of the one before it (of the
        last on CUDA), smallest_budget_bytes.
    """
    from elbowroom.hooks.meter import read_resident_peak, reset_resident_peak

    make_repeatable()
    losses: list[float] = []
    seconds: list[float] = []
    is_last = False
    with terminal.progress(f"{spec}, plain", steady=False) as advance:
        advance("building the model", 0.0)
        workload = build(spec, {**options, "device": default_device()})
        device = next(workload.model.parameters()).device
        resident_bytes = 0
        begun = time.perf_counter()
        while not is_last:
            step = len(losses)
            expected_seconds = (time.perf_counter() - begun) * (step + 2) / max(step, 1)
            is_last = step + 1 >= steps or (step + 1 >= LEAST_STEPS and expected_seconds > patience_seconds)
            reset_resident_peak()
            begin = time.perf_counter()
            loss, peak_bytes, reserved_bytes = _meter(workload, device) if is_last else (float(workload.step()), 0, 0)
            _finish(device)
            losses.append(loss)
            seconds.append(time.perf_counter() - begin)
            resident_bytes = reserved_bytes or (resident_bytes if is_last else read_resident_peak())
            _tell(advance, step, steps, losses[-1], seconds[-1])
        smallest_bytes = _find_smallest(advance, workload, profile) if floor else 0
    return {
        "device": str(device),
        "losses": [loss.hex() for loss in losses],
        "seconds": statistics.median(seconds[SETTLING_STEPS:-1] or seconds[:-1] or seconds),
        "peak_bytes": peak_bytes,
        "resident_bytes": resident_bytes,
        "smallest_budget_bytes": smallest_bytes,
    }


def _meter(workload: Workload, device: torch.device) -> tuple[float, int, int]:
    """Run the last plain step. Return its loss, its peak, and on CUDA the peak of reserved bytes, otherwise 0.

    On CPU the ledger replaces PyTorch's allocator, so resident memory is measured on the steps before.
    """
    from elbowroom.hooks.ledgers import make_ledger
    from elbowroom.hooks.meter import make_meter

    ledger = make_ledger(device)
    ledger.adopt(list_base(workload))
    meter = make_meter(device, ledger)
    meter.start()
    # Keep no loss tensor: the meter would see it freed, but never allocated.
    loss = float(workload.step())
    _finish(device)
    meter.stop()
    ledger.close()
    return loss, meter.peak_bytes, meter.resident_bytes if device.type == "cuda" else 0


def run_within(
    terminal: Terminal, spec: str, options: dict[str, Any], steps: int, profile: HardwareProfile, budget_bytes: int
) -> dict[str, Any]:
    """Train within a budget as a user's loop would: the first steps are captured while they run.

    Returns:
        losses (hexadecimal), forecast and measurements of the planned steps, and the room's report.
    """
    from elbowroom.api import fit

    make_repeatable()
    losses: list[float] = []
    with terminal.progress(f"{spec}, within its budget", steady=False) as advance:
        advance("building the model", 0.0)
        workload = build(spec, {**options, "device": default_device()})
        device = next(workload.model.parameters()).device
        with fit(workload.model, workload.optimizer, budget_bytes, profile=profile) as room:
            for step in range(steps):
                with room.step():
                    losses.append(float(workload.step()))
                    _finish(device)
                _tell(advance, step, steps, losses[-1], room.journal().steps[-1].seconds)
            journal = room.journal()
            planned = room.planned
            report = room.report()
    steady = find_steady(journal)
    assert steady is not None  # at least one step ran
    return {
        "losses": [loss.hex() for loss in losses],
        "modes": [str(record.mode) for record in journal.steps],
        "seconds": steady.seconds,
        # The budget holds from the first step on, so the peak is that of every step.
        "peak_bytes": journal.peak_bytes,
        "planned_peak_bytes": steady.peak_bytes,
        "resident_bytes": steady.resident_bytes,
        "offloaded_bytes": steady.offloaded_bytes,
        "recomputed": steady.recomputed,
        "forecast_peak_bytes": 0 if planned is None else planned.forecast.peak_bytes,
        "forecast_seconds": 0.0 if planned is None else planned.forecast.step_seconds,
        "report": report,
    }


def make_repeatable() -> None:
    """Make steps bitwise reproducible, which CUDA guarantees only on request."""
    import torch

    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        # Deterministic mode would otherwise fill every new block, unlike real training.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def list_base(workload: Workload) -> list[torch.Tensor]:
    """Return the tensors that exist before a step: parameters, buffers, gradients, optimizer state, and the batch."""
    from elbowroom.tracing.residents import list_residents

    return [*(each.tensor for each in list_residents(workload.model, (workload.optimizer,))), *workload.batch.values()]


def _find_smallest(advance: Advance, workload: Workload, profile: HardwareProfile) -> int:
    """Return the smallest feasible budget, from one captured step."""
    from elbowroom.api import fit
    from elbowroom.planner.problem import pose

    advance("finding the smallest budget", 1.0)
    with fit(workload.model, workload.optimizer, _NO_LIMIT_BYTES, profile=profile) as room:
        while room.planned is None:
            with room.step():
                workload.step()
        return pose(room.planned.trace, room.planned.costs, 1).floor.peak_bytes


def _finish(device: torch.device) -> None:
    """Wait for the device, so that the clock measures execution and not only launches."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tell(advance: Advance, step: int, steps: int, loss: float, seconds: float) -> None:
    text = f"{loss:.4f}" if math.isfinite(loss) else str(loss)
    advance(f"step {step + 1} of {steps}, loss {text}, {format_seconds(seconds)}", (step + 1) / steps)
