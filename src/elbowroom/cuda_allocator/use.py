"""Plugs the planned allocator into PyTorch for CUDA memory: `use_planned_allocator`, and the steps that it serves."""

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
from elbowroom.units import format_bytes

logger = logging.getLogger(__name__)

LEAST_SERVED = 0.9
"""A step with a smaller share of requests that went as planned is looked at anew."""

MOST_FUTILE = 8
"""So many steps in a row are recorded without learning anything, and then two in so many."""


class StepTracker:
    """Learns the steps of one device as they come, and has them served at planned addresses.

    Args:
        memory: the library.
        device: index.

    Attributes:
        bound_bytes: what the blocks that were planned last have at once at most: no arena for them is smaller.
    """

    def __init__(self, memory: Memory, device: int) -> None:
        self._memory, self._device = memory, device
        self._learner = RequestPlanner(lambda: memory.list_blocks(device))
        self._is_recording = True
        self._futile = self._count = 0
        self._before = Counts()
        self.bound_bytes = 0
        memory.record(device, True)

    def begin(self) -> bool:
        """A step begins. Returns whether it does: a step inside of another one is part of that."""
        if not self._memory.begin_step(self._device):
            return False
        self._before = self._memory.count(self._device)
        return True

    def end(self) -> None:
        """It ends: from what was recorded, plans are made, and it is decided whether to record the next one."""
        memory, device = self._memory, self._device
        memory.end_step(device)
        self._count += 1
        if self._is_recording:
            self._learn()
        wants = self._is_strange() and (self._futile < MOST_FUTILE or self._count % MOST_FUTILE < 2)
        if wants != self._is_recording:
            self._is_recording = wants
            self._learner.forget()
            memory.record(device, wants)

    def _is_strange(self) -> bool:
        """Whether too many requests of the step were not served as planned."""
        now, before = self._memory.count(self._device), self._before
        served, others = (
            sum(getattr(now, name) - getattr(before, name) for name in names)
            for names in (("hits", "apart"), ("missed", "blocked", "unplanned"))
        )
        return bool(served < LEAST_SERVED * (served + others))

    def _learn(self) -> None:
        events = self._memory.drain(self._device)
        if events is None:  # some were lost
            self._learner.forget()
            return
        plans = self._learner.read(events)
        self._futile = 0 if plans else self._futile + 1
        for plan in plans:
            self.bound_bytes = plan.bound_bytes
            self._memory.plan(self._device, plan.stream, plan.sizes, plan.offsets, plan.arena_bytes)
            logger.info(
                "device %d, stream %d: %d requests of a step lie in an arena of %s from now on, %.2f%% over the bound",
                self._device, plan.stream, len(plan.sizes), format_bytes(plan.arena_bytes),
                100 * (plan.arena_bytes / plan.bound_bytes - 1) if plan.bound_bytes else 0.0,
            )  # fmt: skip


class Arena:
    """The memory of all CUDA devices of this process. Made by `elbowroom.use_planned_allocator`, once and for good.

    Rooms on CUDA use it by themselves. A loop without a room names its steps:

        for batch in loader:
            with arena.step():
                ...
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._keepers: dict[int, StepTracker] = {}

    @contextlib.contextmanager
    def step(self, device: torch.device | int | None = None) -> Iterator[None]:
        """One training step on a device, by default the current one. Steps that come again get planned addresses.

        Raises:
            UsageError: inside another step on the same device.
        """
        keeper = self.find_keeper(find_index(device))
        if not keeper.begin():
            raise UsageError(
                "a step of the arena inside another one on the same device: one `with arena.step():` is one training "
                "step, and `room.step()` is one already"
            )
        try:
            yield
        finally:
            keeper.end()

    def find_keeper(self, index: int) -> StepTracker:
        """Who has learnt the steps of a device."""
        if index not in self._keepers:
            self._keepers[index] = StepTracker(self._memory, index)
        return self._keepers[index]

    def count(self, device: torch.device | int | None = None) -> Counts:
        """What has been counted on a device so far: bytes, peaks, and how requests were served."""
        return self._memory.count(find_index(device))


def find_index(device: torch.device | int | None) -> int:
    """The index of a CUDA device; None, and one without an index, is the current one."""
    index = device.index if isinstance(device, torch.device) else device
    return torch.cuda.current_device() if index is None else index


def use_planned_allocator() -> Arena:
    """Have PyTorch get its CUDA memory from planned addresses, in this process and from now on.

    Has to be called before anything is on a CUDA device. The library is compiled by the system's C compiler when it is
    first asked for, and kept. What PyTorch's own allocator serves besides memory, an arena does not: CUDA graphs, pools
    of `torch.cuda.MemPool`, memory shared with other processes, snapshots.

    Raises:
        UsageError: there is no CUDA device, or something is on one already; there is no C compiler.
    """
    if find_arena() is None:
        if not torch.cuda.is_available():
            raise UsageError(
                "an arena is for CUDA devices, and PyTorch finds none; on a CPU leave out use_planned_allocator()"
            )
        if torch.cuda.is_initialized():
            raise UsageError(
                "PyTorch has already given out CUDA memory, and keeps the allocator that did: call "
                "elbowroom.use_planned_allocator() first thing in the program, before any tensor or model is on a "
                "CUDA device"
            )
    return _plug_in()


def find_arena() -> Arena | None:
    """The arena that is in use; None if there is none."""
    return _plug_in() if _plug_in.cache_info().currsize else None


@functools.cache  # one for the process, as PyTorch has one allocator; a failure is not kept
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
    """The file of the CUDA runtime that PyTorch has loaded.

    Raises:
        UsageError: it has loaded none of its own.
    """
    with open("/proc/self/maps") as maps:
        for line in maps:
            found = re.search(r" (/.*/libcudart[^/]*\.so[^/]*)$", line.rstrip("\n"))
            if found:
                return found[1]
    raise UsageError(
        "PyTorch has loaded no libcudart.so, so the arena cannot use the same; leave out use_planned_allocator()"
    )


def _answer_statistics(memory: Memory) -> None:
    """torch.cuda.memory_stats and all that rests on it. Of an allocator that is plugged in PyTorch asks nothing, and
    raises: what meters, and programs, ask for is answered here."""
    bindings: Any = torch._C
    bindings._cuda_memoryStats = lambda device: nest_statistics(memory.count(device))
    bindings._cuda_resetPeakMemoryStats = memory.reset_peaks
    bindings._cuda_resetAccumulatedMemoryStats = lambda device: None  # nothing that is accumulated is told


@contextlib.contextmanager
def serving(device: torch.device) -> Iterator[None]:
    """A step of a room: one of the arena too, if there is one for this device, and no step of it has begun already."""
    arena = find_arena() if device.type == "cuda" else None
    keeper = None if arena is None else arena.find_keeper(find_index(device))
    if keeper is None or not keeper.begin():
        yield
        return
    try:
        yield
    finally:
        keeper.end()
