"""Measures the bytes and seconds of a running step and of each of its ops.

Bytes come from PyTorch's caching allocator (CUDA) or the room's ledger (CPU), the resident peak from the system.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.cuda_ledger import CudaLedger

HEAD_START_CYCLES = 200_000
"""CUDA cycles to sleep before each timed op: about 0.1 ms, longer than the host takes to launch most ops."""

SECONDS_BETWEEN_READINGS = 0.1
"""The resident peak is reset and read at most so often: both take longer than short steps can spare."""


class Meter(Protocol):
    """Measures one step.

    Attributes:
        peak_bytes: peak of live bytes on the device; 0 before `stop`.
        resident_bytes: peak resident memory of the process (CPU), or peak reserved bytes of the allocator (CUDA).
            Steps shorter than `SECONDS_BETWEEN_READINGS` share the peak of several.
        base_bytes: live bytes when the meter started.
        is_detailed: whether each op is measured, too, between `begin_op` and `end_op`.
    """

    peak_bytes: int
    resident_bytes: int
    is_detailed: bool

    @property
    def base_bytes(self) -> int: ...

    def start(self) -> None:
        """Begin to measure."""
        ...

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        """Count a storage that may be older than the step."""
        ...

    def begin_op(self) -> Any:
        """Note that an op is about to run. Returns the argument for `end_op`."""
        ...

    def end_op(self, begun: Any, least_bytes: int = 0) -> None:
        """Note that an op has run, or has been launched on the device. Not called for an op that failed.

        Args:
            least_bytes: that it is known to take as a whole, if it has run in slices.
        """
        ...

    def stop(self) -> None:
        """Stop measuring."""
        ...

    def op_seconds(self) -> tuple[float, ...]:
        """Return the seconds of each op."""
        ...

    def op_bytes(self) -> Sequence[int]:
        """Return the live bytes when each op began, as if nothing had been moved."""
        ...

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        """Return the peak that each of the first ops allocated beyond the bytes of its results (`created_bytes`)."""
        ...


def make_meter(
    device: torch.device,
    ledger: CpuLedger | CudaLedger,
    *,
    is_detailed: bool = True,
    find_stall: Callable[[], float] = lambda: 0.0,
) -> Meter:
    """Return a meter for a device, which on a CPU reads the ledger.

    Args:
        find_stall: returns the seconds that the host has waited for transfers, which ops do not count as their own.
    """
    if isinstance(ledger, CpuLedger):
        return CpuMeter(ledger, is_detailed=is_detailed, find_stall=find_stall)
    return CudaMeter(device, ledger, is_detailed=is_detailed)


_NO_CHANGES = np.zeros(0, dtype=np.int64)


class CpuMeter:
    """Reads the scope of a CPU ledger; for `find_stall` see `make_meter`."""

    def __init__(
        self, ledger: CpuLedger, *, is_detailed: bool = True, find_stall: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.peak_bytes = self.resident_bytes = 0
        self._ledger = ledger
        self._scope = ledger.scope
        self.is_detailed = is_detailed
        self._ops: list[tuple[int, int, float]] = []  # begin, end and seconds of waiting; at once, as Ctrl-C may come
        self._find_stall = find_stall
        self._live_before = self._adopted_before = 0
        self._times = self._live = _NO_CHANGES

    @property
    def base_bytes(self) -> int:
        """Live bytes when the meter started, including storages adopted since."""
        return int(self._live_before + self._scope.adopted_bytes - self._adopted_before)

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        return self._ledger.adopt_input(storage)

    def start(self) -> None:
        _resident_peak.begin_step()
        self._scope.reset_peak()
        self._live_before, self._adopted_before = self._scope.live_bytes, self._scope.adopted_bytes
        if self.is_detailed:
            self._scope.set_recording(True)
            self._ledger.moves = []

    def begin_op(self) -> tuple[float, int]:
        return self._find_stall(), time.time_ns()

    def end_op(self, begun: tuple[float, int], least_bytes: int = 0) -> None:
        stalled, begin = begun
        self._ops.append((begin, time.time_ns(), self._find_stall() - stalled))

    def stop(self) -> None:
        self.peak_bytes, self.resident_bytes = int(self._scope.peak_bytes), _resident_peak.read()
        if self.is_detailed:
            self._times, self._live = (np.frombuffer(each, dtype=np.int64) for each in self._scope.take_changes())
            self._scope.set_recording(False)
            moves, self._ledger.moves = self._ledger.moves or [], None
            self._live = self._live - _sum_moves(moves, self._times)

    def op_seconds(self) -> tuple[float, ...]:
        return tuple(max(0.0, (end - begin) * 1e-9 - stall) for begin, end, stall in self._ops)

    def op_bytes(self) -> Sequence[int]:
        if not len(self._times):
            return ()
        firsts = np.searchsorted(self._times, [begin for begin, _, _ in self._ops], side="left")
        return [int(self._live[max(0, first - 1)]) for first in firsts.tolist()]

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        if not len(self._times):
            return (0,) * len(created_bytes)
        taken = self._count_taken()
        return tuple(max(0, most - created) for most, created in zip(taken, created_bytes, strict=False))

    def _count_taken(self) -> list[int]:
        """Return for each op the peak of live bytes above those at its beginning."""
        firsts = np.searchsorted(self._times, [begin for begin, _, _ in self._ops], side="left").tolist()
        lasts = np.searchsorted(self._times, [end for _, end, _ in self._ops], side="right").tolist()
        found = []
        for first, last in zip(firsts, lasts, strict=True):
            before = int(self._live[first - 1])
            found.append(max(0, int(self._live[first:last].max()) - before) if last > first else 0)
        return found


def _sum_moves(moves: Sequence[tuple[int, int]], times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the bytes that have come back and not left again, at each time.

    The workspace of an op must not depend on the state that it brought back, or on what left to make room.
    """
    moments = np.array([moment for moment, _ in moves], dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum([nbytes for _, nbytes in moves], dtype=np.int64)))
    return sums[np.searchsorted(moments, times, side="right")]


class CudaMeter:
    """Reads the caching allocator's counters, which follow the host and not the device's queue.

    Attributes:
        base_bytes: allocated bytes when the meter started, including memory without a tensor, such as the workspaces
            that cuBLAS keeps for each thread.
    """

    def __init__(self, device: torch.device, ledger: CudaLedger, *, is_detailed: bool = True) -> None:
        self.peak_bytes = self.resident_bytes = self.base_bytes = 0
        self._device, self.is_detailed = device, is_detailed
        self._ledger = ledger
        self._spans: list[tuple[Any, Any]] = []
        self._inner: list[int] = []
        self._before: list[int] = []

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        pass  # the allocator counts everything

    def start(self) -> None:
        self._ledger.begin_peaks()
        self.base_bytes = self._ledger.live_bytes

    def begin_op(self) -> tuple[Any, int]:
        # What comes back or leaves during the op is no workspace of it. Most of it does so at the beginning.
        before = self._ledger.live_bytes - self._ledger.moved_bytes
        self._ledger.reset_peaks()
        begin = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            # A device that waits for the host would measure the launch, which in an unmeasured step overlaps with
            # earlier ops. So the host gets a head start.
            torch.cuda._sleep(HEAD_START_CYCLES)
            begin.record()
        return begin, before

    def end_op(self, begun: tuple[Any, int], least_bytes: int = 0) -> None:
        begin, before = begun
        end = torch.cuda.Event(enable_timing=True)
        with torch.cuda.device(self._device):
            end.record()
        self._spans.append((begin, end))
        _, peak_bytes, _, _ = self._ledger.count_bytes()
        self._before.append(before)
        self._inner.append(max(least_bytes, peak_bytes - before - self._ledger.moved_bytes))

    def stop(self) -> None:
        if self.is_detailed:
            torch.cuda.synchronize(self._device)  # `elapsed_time` needs completed events
        self.peak_bytes, self.resident_bytes = self._ledger.read_peaks()

    def op_seconds(self) -> tuple[float, ...]:
        return tuple(begin.elapsed_time(end) * 1e-3 for begin, end in self._spans)

    def op_bytes(self) -> Sequence[int]:
        return self._before

    def workspace_bytes(self, created_bytes: Sequence[int]) -> tuple[int, ...]:
        # The allocator rounds each block up to 512 bytes, results included.
        return tuple(
            max(0, inner - -(-created // 512) * 512) for inner, created in zip(self._inner, created_bytes, strict=False)
        )


class _ResidentPeak:
    """The process's high-water mark of resident memory in its steps."""

    def __init__(self) -> None:
        self._last_reset = -math.inf
        self._last_reading = -math.inf
        self._bytes = 0

    def begin_step(self) -> None:
        """Reset the mark, unless that was done a moment ago."""
        now = time.perf_counter()
        if now - self._last_reset >= SECONDS_BETWEEN_READINGS:
            self._last_reset = now
            reset_resident_peak()

    def read(self) -> int:
        """Return the mark in bytes as it was at most a moment ago."""
        now = time.perf_counter()
        if now - self._last_reading >= SECONDS_BETWEEN_READINGS:
            self._last_reading = now
            self._bytes = read_resident_peak()
        return self._bytes


_resident_peak = _ResidentPeak()


def reset_resident_peak() -> None:
    """Reset the process's high-water mark of resident memory, if the system allows it."""
    try:
        file = os.open("/proc/self/clear_refs", os.O_WRONLY)  # `open` takes three times as long
    except OSError:
        return  # the mark then covers the whole life of the process
    try:
        with contextlib.suppress(OSError):
            os.write(file, b"5")
    finally:
        os.close(file)


def read_resident_peak() -> int:
    """Return the high-water mark of resident memory in bytes; 0 if the system does not report it.

    `getrusage` would be faster, but its mark starts at that of the parent process.
    """
    try:
        file = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return 0
    try:
        status = os.read(file, 1 << 14)
    except OSError:
        return 0
    finally:
        os.close(file)
    _, _, mark = status.partition(b"VmHWM:")
    return int(mark.split(maxsplit=1)[0]) * 1024 if mark else 0
