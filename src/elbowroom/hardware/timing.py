"""Median time of calls on a device, measured by the device itself on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def wait_for(device: torch.device) -> None:
    """Return when the device has finished all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    call: Callable[[], object], device: torch.device, *, budget_seconds: float = 0.25, least: int = 3
) -> float:
    """Return the median time of one call, after a warm-up call.

    Args:
        budget_seconds: time during which to repeat calls, at least `least` times.
    """
    call()
    wait_for(device)
    times: list[float] = []
    deadline = time.perf_counter() + budget_seconds
    while len(times) < least or time.perf_counter() < deadline:
        times.append(_cuda_seconds(call, device) if device.type == "cuda" else _host_seconds(call))
    return max(statistics.median(times), 1e-9)


def _host_seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _cuda_seconds(call: Callable[[], object], device: torch.device) -> float:
    # The device itself records the times of events, so the host's launch overhead is excluded.
    with torch.cuda.device(device):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        call()
        ended.record()
        ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1e3
