"""Measures the real bytes and seconds of a running step, and of each of its ops.

On CUDA the allocator keeps counts. On a CPU nobody does, but PyTorch's profiler reports every allocation and release
that goes through its allocator, those inside kernels included; and the system knows the peak of resident memory.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

HEAD_START_CYCLES = 200_000
"""Of a CUDA device, before each op that is timed: about a tenth of a millisecond, more than handing out most ops."""


class Meter(Protocol):
    """Counts bytes during one step. Ops are told of one by one, or not at all.

    Attributes:
        peak_bytes: most bytes on the device at once; 0 before `stop` and if they could not be measured.
        resident_bytes: the process's peak resident memory (CPU), or the allocator's peak reserved bytes (CUDA).
        base_bytes: what the allocator had handed out when the meter started; 0 where it does not tell (CPU).
    """

    peak_bytes: int
    resident_bytes: int
    base_bytes: int

    def start(self, there: Iterable[torch.Tensor] = (), other_bytes: int = 0) -> None:
        """Begin to count.

        Args:
            there: what is on the device now, for where the allocator does not tell.
            other_bytes: what is there besides.
        """
        ...

    def begin_op(self) -> Any:
        """An op is about to run. Returns what to give to `end_op`."""
        ...

    def end_op(self, begun: Any) -> None:
        """It has run, or been handed to the device. One that failed is never told of."""
        ...

    def stop(self) -> None:
        """End."""
        ...

    def op_seconds(self) -> tuple[float, ...]:
        """Of each op that was told of."""
        ...

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        """Most that each of the first ops allocated inside itself, beyond the results that it `created`."""
        ...

    def count_taken(self, begins: Sequence[int], ends: Sequence[int]) -> list[int]:
        """Most that was there in each span between two moments of `time.time_ns`, beyond what there was at its begin;
        nothing where the meter cannot tell."""
        ...


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


_PROFILING = threading.Lock()
"""Held by the one meter of this process that runs a profiler."""


class CpuMeter:
    """Reads every allocation from the profiler; if another profiler is running, counts no tensor bytes."""

    def __init__(self) -> None:
        self.peak_bytes = self.resident_bytes = self.base_bytes = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._is_running = False
        self._there: dict[int, int] = {}  # bytes by address
        self._other_bytes = self._begin = 0
        self._times = np.zeros(0, dtype=np.int64)
        self._live = np.zeros(0, dtype=np.int64)

    def start(self, there: Iterable[torch.Tensor] = (), other_bytes: int = 0) -> None:
        self._there = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
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

    def begin_op(self) -> int:
        return time.time_ns()

    def end_op(self, begun: int) -> None:
        self._begins.append(begun)
        self._ends.append(time.time_ns())

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

    def op_seconds(self) -> tuple[float, ...]:
        return tuple((end - begin) * 1e-9 for begin, end in zip(self._begins, self._ends, strict=True))

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        if not len(self._times):
            return (0,) * len(created_bytes)
        taken = self.count_taken(self._begins, self._ends)
        return tuple(max(0, most - created) for most, created in zip(taken, created_bytes, strict=False))

    def count_taken(self, begins: Sequence[int], ends: Sequence[int]) -> list[int]:
        if not len(self._times):
            return []
        firsts = np.searchsorted(self._times, begins, side="left").tolist()
        lasts = np.searchsorted(self._times, ends, side="right").tolist()
        found = []
        for first, last in zip(firsts, lasts, strict=True):
            before = int(self._live[first - 1])
            found.append(max(0, int(self._live[first:last].max()) - before) if last > first else 0)
        return found


class CudaMeter:
    """Reads the caching allocator's counters, which follow the program and not the device's queue.

    Attributes:
        base_bytes: what the allocator had handed out when the meter started, whoever holds it: also what no tensor of
            the step shows, such as the workspaces that cuBLAS keeps for each thread.
    """

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = self.resident_bytes = self.base_bytes = 0
        self._device = device
        self._spans: list[tuple[Any, Any]] = []
        self._inner: list[int] = []

    def start(self, there: Iterable[torch.Tensor] = (), other_bytes: int = 0) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self.base_bytes = torch.cuda.memory_allocated(self._device)

    def begin_op(self) -> tuple[Any, int]:
        self._note_peak()
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        begin = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            # A device that waits for the host would measure how long the host takes to hand the op out, which in a
            # step that is not watched happens while earlier ops run. So the host gets a head start.
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
        return begin, before

    def end_op(self, begun: tuple[Any, int]) -> None:
        begin, before = begun
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            end.record()
        self._spans.append((begin, end))
        self._inner.append(torch.cuda.max_memory_allocated(self._device) - before)

    def stop(self) -> None:
        torch.cuda.synchronize(self._device)
        self._note_peak()

    def _note_peak(self) -> None:
        counts = torch.cuda.memory_stats(self._device)  # once: asking takes the allocator some time
        self.peak_bytes = max(self.peak_bytes, counts.get("allocated_bytes.all.peak", 0))
        self.resident_bytes = max(self.resident_bytes, counts.get("reserved_bytes.all.peak", 0))

    def op_seconds(self) -> tuple[float, ...]:
        return tuple(begin.elapsed_time(end) * 1e-3 for begin, end in self._spans)

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        # The allocator rounds each block up to 512 bytes; the results among them are counted rounded elsewhere.
        return tuple(
            max(0, inner - -(-created // 512) * 512) for inner, created in zip(self._inner, created_bytes, strict=False)
        )

    def count_taken(self, begins: Sequence[int], ends: Sequence[int]) -> list[int]:
        return []  # the allocator keeps no record of when


def reset_resident_peak() -> None:
    """Let the system's high-water mark of this process's resident memory begin anew, where it offers that."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # then the mark is that of the whole process's life


def read_resident_peak() -> int:
    """The high-water mark of resident memory in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
