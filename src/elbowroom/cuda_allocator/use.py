"""Plug the planned allocator into PyTorch: `use_planned_allocator`, and tracking of training steps."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch

from elbowroom.cuda_allocator.build import build_library
from elbowroom.cuda_allocator.learning import RequestPlanner
from elbowroom.cuda_allocator.library import Counts, Memory
from elbowroom.cuda_allocator.statistics import nest_statistics
from elbowroom.errors import UsageError
from elbowroom.native import library
from elbowroom.units import format_bytes

logger = logging.getLogger(__name__)

LEAST_SERVED = 0.9
"""If a smaller share of a step's requests is served as planned, recording restarts."""

MOST_FUTILE = 8
"""Most consecutive steps recorded without a new plan; after that, two of every so many steps are recorded."""


class StepTracker:
    """Learns the steps of one device while they run, and installs plans for them.

    Args:
        memory: the allocator.
        device: index.

    Attributes:
        bound_bytes: peak bytes of the blocks planned last: a lower bound on their arena.
    """

    def __init__(self, memory: Memory, device: int) -> None:
        self._memory, self._device = memory, device
        self._planner = RequestPlanner(lambda: memory.list_blocks(device))
        self._is_recording = True
        self._futile = self._count = 0
        self._before = Counts()
        self.bound_bytes = 0
        memory.record(device, True)

    def begin(self) -> bool:
        """Begin a step. Returns False inside another step, which this one then is part of."""
        if not self._memory.begin_step(self._device):
            return False
        self._before = self._memory.count(self._device)
        return True

    def end(self) -> None:
        """End a step: make plans from its events, and decide whether to record the next step."""
        memory, device = self._memory, self._device
        memory.end_step(device)
        self._count += 1
        if self._is_recording:
            self._learn()
        wants = self._is_mispredicted() and (self._futile < MOST_FUTILE or self._count % MOST_FUTILE < 2)
        if wants != self._is_recording:
            self._is_recording = wants
            self._planner.forget()
            memory.record(device, wants)

    def _is_mispredicted(self) -> bool:
        """Tell whether too few requests of the step were served as planned."""
        now, before = self._memory.count(self._device), self._before
        served, others = (
            sum(getattr(now, name) - getattr(before, name) for name in names)
            for names in (("hits", "apart"), ("missed", "blocked", "unplanned"))
        )
        return bool(served < LEAST_SERVED * (served + others))

    def _learn(self) -> None:
        events = self._memory.drain(self._device)
        if events is None:  # some were lost
            self._planner.forget()
            return
        plans = self._planner.read(events)
        self._futile = 0 if plans else self._futile + 1
        for plan in plans:
            self.bound_bytes = plan.bound_bytes
            self._memory.plan(self._device, plan.stream, plan.sizes, plan.offsets, plan.arena_bytes)
            logger.info(
                "device %d, stream %d: planned %d requests of a step in an arena of %s, %.2f%% above the lower bound",
                self._device, plan.stream, len(plan.sizes), format_bytes(plan.arena_bytes),
                100 * (plan.arena_bytes / plan.bound_bytes - 1) if plan.bound_bytes else 0.0,
            )  # fmt: skip


class Arena:
    """The planned allocator of this process. Created once, by `elbowroom.use_planned_allocator`; it cannot be removed.

    Rooms on CUDA devices use it automatically. A training loop without a room marks its steps:

        for batch in loader:
            with arena.step():
                ...
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._trackers: dict[int, StepTracker] = {}

    @contextlib.contextmanager
    def step(self, device: torch.device | int | None = None) -> Iterator[None]:
        """Mark one training step on a device, by default the current one. Recurring steps get planned addresses.

        Raises:
            UsageError: inside another step on the same device.
        """
        tracker = self.find_keeper(find_index(device))
        if not tracker.begin():
            raise UsageError(
                "a step of the arena inside another one on the same device: one `with arena.step():` is one training "
                "step, and `room.step()` is one already"
            )
        try:
            yield
        finally:
            tracker.end()

    def find_keeper(self, index: int) -> StepTracker:
        """Return the step tracker of a device."""
        if index not in self._trackers:
            self._trackers[index] = StepTracker(self._memory, index)
        return self._trackers[index]

    def count(self, device: torch.device | int | None = None) -> Counts:
        """Return the counters of a device: bytes, peaks, and how requests were served."""
        return self._memory.count(find_index(device))


def find_index(device: torch.device | int | None) -> int:
    """Return the index of a CUDA device; the current one for None, or a device without an index."""
    index = device.index if isinstance(device, torch.device) else device
    return torch.cuda.current_device() if index is None else index


def use_planned_allocator() -> Arena:
    """Replace PyTorch's CUDA allocator with one that serves recurring steps at planned addresses.

    Call it before the program allocates CUDA memory; it affects the whole process. The library is compiled with the
    system's C compiler on first use, and cached. Not supported: CUDA graphs, `torch.cuda.MemPool`, memory shared with
    other processes, memory snapshots.

    Raises:
        UsageError: there is no CUDA device, CUDA is initialized already, or no C compiler is installed.
    """
    if find_arena() is None:
        if not torch.cuda.is_available():
            raise UsageError(
                "the planned allocator needs a CUDA device, and PyTorch finds none; on a CPU leave out "
                "use_planned_allocator()"
            )
        if torch.cuda.is_initialized():
            raise UsageError(
                "PyTorch has already allocated CUDA memory, and keeps its allocator: call "
                "elbowroom.use_planned_allocator() at the beginning of the program, before any tensor or model is on a "
                "CUDA device"
            )
    return _plug_in()


def find_arena() -> Arena | None:
    """Return the arena in use; None if there is none."""
    return _plug_in() if _plug_in.cache_info().currsize else None


@functools.cache  # one per process, as PyTorch has one allocator; failures are not cached
def _plug_in() -> Arena:
    path = build_library()
    memory = Memory(path, runtime=find_runtime())
    allocator: Any = torch.cuda.memory.CUDAPluggableAllocator(str(path), "elbowroom_alloc", "elbowroom_free")
    inner = allocator.allocator()
    setters = {
        "set_record_stream_fn": "elbowroom_record_stream",
        "set_reset_fn": "elbowroom_empty_cache",
        "set_begin_allocate_to_pool": "elbowroom_refuse_pool",
    }
    missing = [name for name in setters if not hasattr(inner, name)]
    if missing:
        raise UsageError(f"torch {torch.__version__} has no {', '.join(missing)}, so no arena can be plugged in safely")
    for name, function in setters.items():
        getattr(inner, name)(memory.find_function(function))
    memory.install()
    torch.cuda.memory.change_current_allocator(allocator)
    _answer_statistics(memory)
    return Arena(memory)


def find_runtime() -> str:
    """Return the file of the CUDA runtime that PyTorch has loaded.

    Raises:
        UsageError: the process has loaded no shared CUDA runtime.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            found = re.search(r" (/.*/libcudart[^/]*\.so[^/]*)$", line.rstrip("\n"))
            if found:
                return found[1]
    raise UsageError(
        "PyTorch has loaded no libcudart.so, which the planned allocator needs; leave out use_planned_allocator()"
    )


def _answer_statistics(memory: Memory) -> None:
    """Make `torch.cuda.memory_stats`, and functions built on it, work: PyTorch raises for pluggable allocators."""
    bindings: Any = torch._C
    library.load().replace_device_counts(*memory.find_counters())
    bindings._cuda_memoryStats = lambda device: nest_statistics(memory.count(device))
    bindings._cuda_resetPeakMemoryStats = memory.reset_peaks
    bindings._cuda_resetAccumulatedMemoryStats = lambda device: None  # accumulated statistics are not counted


@contextlib.contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """Mark a step of a room as a step of the arena, if one is in use and not inside a step already."""
    arena = find_arena() if device.type == "cuda" else None
    tracker = None if arena is None else arena.find_keeper(find_index(device))
    if tracker is None or not tracker.begin():
        yield
        return
    try:
        yield
    finally:
        tracker.end()
