"""A meter that is not ours: PyTorch's profiler tells of every allocation and release, those inside kernels included."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from elbowroom.hooks.meter import read_resident_peak, reset_resident_peak
from elbowroom.hooks.storage_ids import get_address

_PROFILING = threading.Lock()
"""Held by the one meter of this process that runs a profiler."""


class ProfilerMeter:
    """Reads every allocation from the profiler; if another profiler is running, counts no tensor bytes."""

    def __init__(self) -> None:
        self.peak_bytes = self.resident_bytes = 0
        self._is_running = False
        self._there: dict[int, int] = {}  # bytes by address
        self._other_bytes = self._begin = 0
        self._times = np.zeros(0, dtype=np.int64)
        self._live = np.zeros(0, dtype=np.int64)

    def start(self, there: Iterable[torch.Tensor] = (), other_bytes: int = 0) -> None:
        self._there = {
            get_address(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
            for tensor in there
            if tensor.layout is torch.strided and tensor.device.type == "cpu"
        }
        self._other_bytes = other_bytes
        reset_resident_peak()
        # Of profilers in other threads PyTorch does not say that they run, and two at once end the process.
        if torch._C._autograd._profiler_enabled() or not _PROFILING.acquire(blocking=False):
            return
        # Kineto writes a line to the terminal whenever it starts and stops, unless it is told not to.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        # As torch.autograd.profiler.profile(profile_memory=True) does it, but for the ops themselves, which would take
        # as much time again as the allocations that are asked for.
        config = torch.autograd.profiler.profile(use_cpu=True, profile_memory=True, acc_events=False).config()
        activities = {torch._C._profiler.ProfilerActivity.CPU}
        try:
            torch._C._autograd._prepare_profiler(config, activities)
            torch._C._autograd._enable_profiler(config, activities, {torch._C._profiler.RecordScope.USER_SCOPE})  # type: ignore[call-arg]
        except BaseException:
            _PROFILING.release()
            raise
        self._is_running, self._begin = True, time.time_ns()

    def stop(self) -> None:
        self.resident_bytes = read_resident_peak()
        if not self._is_running:
            return
        self._is_running = False
        try:
            pending: list[Any] = torch._C._autograd._disable_profiler().experimental_event_tree()
        finally:
            _PROFILING.release()
        events = []
        while pending:
            event = pending.pop()
            pending += event.children  # optimizers mark their steps, and what is made in one lies below the mark
            if event.tag == torch._C._profiler._EventType.Allocation and event.extra_fields.device.type == "cpu":
                events.append((event.start_time_ns, event.extra_fields))
        events.sort(key=lambda event: event[0])
        live = self._other_bytes + sum(self._there.values())
        times, lives, known = [self._begin], [live], dict(self._there)
        for nanoseconds, block in events:
            if block.alloc_size > 0:
                live -= known.pop(block.ptr, 0)  # a thread without a profiler has released what was there
                known[block.ptr] = block.alloc_size
                live += block.alloc_size
            else:
                live -= known.pop(block.ptr, 0)  # what nobody knew of was not counted either
            times.append(nanoseconds)
            lives.append(live)
        self._times, self._live = np.array(times, dtype=np.int64), np.array(lives, dtype=np.int64)
        self.peak_bytes = max(lives)

    def timeline(self) -> tuple[list[float], list[int]]:
        """Every allocation and release of the step: when (in seconds), and the bytes then on."""
        if not len(self._times):
            return [], []
        return ((self._times - self._times[0]) * 1e-9).tolist(), self._live.tolist()
