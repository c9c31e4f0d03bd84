"""Seconds and bytes of steps on a device, and what the copies beside them really took."""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.profiler_meter import ProfilerMeter
from elbowroom.ir.trace import Trace
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.device_limit import DeviceLimit
from elbowroom.runtime.paged_storages import PagedStorages
from elbowroom.runtime.step_runner import StepRunner
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.streams import CudaStreams, number_stream
from elbowroom.tracing.residents import list_residents
from elbowroom.workloads import Workload

Step = Callable[[], object]


def wait_for(device: torch.device) -> None:
    """Return when the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_steps(step: Step, device: torch.device, count: int) -> list[float]:
    """Wall seconds of each of some steps, from an idle device to an idle device."""
    seconds = []
    for _ in range(count):
        wait_for(device)
        begin = time.perf_counter()
        step()
        wait_for(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def median(seconds: Sequence[float]) -> float:
    """The median, 0 of nothing."""
    return statistics.median(seconds) if seconds else 0.0


def measure_peaks(step: Step, workload: Workload, device: torch.device, count: int = 1) -> dict[str, int]:
    """Most bytes on the device during some steps.

    Returns:
        allocated: tensors, rounding included; requested: without it; reserved: held by the allocator, used or not.
        On a CPU only the first is known.
    """
    wait_for(device)
    if device.type != "cuda":
        meter = ProfilerMeter()
        residents = [each.tensor for each in list_residents(workload.model, (workload.optimizer,))]
        meter.start((*residents, *workload.batch.values()))
        for _ in range(count):
            step()
        meter.stop()
        return {"allocated": meter.peak_bytes, "requested": 0, "reserved": 0}
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(count):
        step()
    torch.cuda.synchronize(device)
    return read_peaks(device)


def read_peaks(device: torch.device) -> dict[str, int]:
    """The allocator's peaks since they were last reset."""
    counts = torch.cuda.memory_stats(device)
    kinds = ("allocated", "requested", "reserved")
    return {kind: int(counts.get(f"{kind}_bytes.all.peak", 0)) for kind in kinds}


def measure_host(step: Step, device: torch.device, count: int) -> dict[str, float]:
    """What steps ask of the host.

    Returns:
        host_seconds: median time until a step returns, which the device may not have done by then; retries,
        device_allocs and device_frees: means for one step of the requests that the caching allocator could only serve
        after it had waited and given memory back, and of its calls of cudaMalloc and cudaFree. 0 on a CPU.
    """
    names = {"retries": "num_alloc_retries", "device_allocs": "num_device_alloc", "device_frees": "num_device_free"}
    seconds = []
    before = _read_counts(names, device)
    for _ in range(count):
        wait_for(device)
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    wait_for(device)
    after = _read_counts(names, device)
    return {"host_seconds": median(seconds)} | {name: (after[name] - before[name]) / count for name in names}


def _read_counts(names: dict[str, str], device: torch.device) -> dict[str, int]:
    counts = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {name: int(counts.get(each, 0)) for name, each in names.items()}


def count_outside(trace: Trace, device: torch.device, alignment_bytes: int) -> int:
    """Bytes that are allocated between steps and that no storage of a trace stands for.

    The workspaces that cuBLAS keeps for each of its handles, above all.
    """
    if device.type != "cuda":
        return 0
    known = sum(-(-s.nbytes // alignment_bytes) * alignment_bytes for s in trace.storages if s.created < 0)
    return int(torch.cuda.memory_allocated(device)) - known


def release_all(device: torch.device) -> None:
    """Free what nobody holds any more, cached blocks too."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


HOST_CALLS: dict[Any, tuple[str, ...]] = {
    StepRunner: ("save", "need", "move", "bring", "move_state", "make_room"),
    DeviceLimit: ("make_room", "prepare_room", "keep_budget", "lift_limit", "restore_limit"),
    ActionExecutor: ("_recompute", "_prepare_replay"),
    StreamTransfers: ("offload", "reload", "finish", "discard"),
    CudaStreams: ("record_compute", "copy_out", "copy_in", "compute_waits", "allocate"),
    PagedStorages: ("begin_copy", "begin_reload", "release", "evict", "restore"),
}
"""Methods that a step calls for what it moves; some call others."""


def measure_calls(step: Step, count: int) -> dict[str, dict[str, float]]:
    """Calls a step of the methods in `HOST_CALLS`, and their seconds, those of the methods that they call included."""
    found: dict[str, list[float]] = {}
    with contextlib.ExitStack() as undoing:
        for owner, names in HOST_CALLS.items():
            for name in names:
                method = getattr(owner, name)
                times = found[f"{owner.__name__}.{name}"] = []
                setattr(owner, name, _time_calls(method, times))
                undoing.callback(setattr, owner, name, method)
        for _ in range(count):
            step()
    return {name: {"calls": len(each) / count, "seconds": sum(each) / count} for name, each in found.items() if each}


def _time_calls(method: Any, times: list[float]) -> Any:
    @functools.wraps(method)
    def timed(*args: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        try:
            return method(*args, **options)
        finally:
            times.append(time.perf_counter() - begin)

    return timed


class TransferClock:
    """Times every copy of a room, and how long the computing stream waited for one. Costs some time itself.

    Replaces methods of the room's streams until `stop`.
    """

    def __init__(self, room: Any) -> None:
        streams = self._streams = room._transfers.streams
        self._copies: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        copy_out, copy_in, compute_waits = streams.copy_out, streams.copy_in, streams.compute_waits

        def timed_out(source: Any, host: Any, after: Any, offset: int = 0) -> Any:
            return self._time(streams.out_stream, after, lambda: copy_out(source, host, after, offset))

        def timed_in(host: Any, target: Any, after: Any, offset: int = 0) -> Any:
            return self._time(streams.back_stream, after, lambda: copy_in(host, target, after, offset))

        def timed_wait(event: Any) -> None:
            stream = torch.cuda.current_stream(streams.device)
            begin = _mark(stream)
            compute_waits(event)
            self._waits.append((begin, _mark(stream)))

        streams.copy_out, streams.copy_in, streams.compute_waits = timed_out, timed_in, timed_wait

    def _time(self, stream: Any, after: Any, copy: Callable[[], Any]) -> Any:
        for event in after:  # so that the copy's time begins when it may
            event.block(number_stream(stream))
        begin = _mark(stream)
        event = copy()
        self._copies.append((begin, _mark(stream)))
        return event

    def stop(self) -> tuple[float, float]:
        """Seconds of all copies, and seconds that the computing stream waited for them."""
        streams = self._streams
        del streams.copy_out, streams.copy_in, streams.compute_waits  # the methods of the class are seen again
        torch.cuda.synchronize(streams.device)
        return _sum_of(self._copies), _sum_of(self._waits)


def _mark(stream: Any) -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _sum_of(spans: list[tuple[Any, Any]]) -> float:
    return sum(float(begin.elapsed_time(end)) for begin, end in spans) / 1e3
