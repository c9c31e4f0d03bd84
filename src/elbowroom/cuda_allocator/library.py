"""ctypes bindings of the C library, as declared in `memory.h`."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from elbowroom.errors import UsageError

EVENT = np.dtype([("nbytes", np.int64), ("serial", np.int64), ("stream", np.uint64), ("segment", np.uint64)])
"""A recorded event: bytes allocated, 0 for a free, or one of the two constants below; the block's serial number, its
stream, and the address of its segment (0 in an arena)."""

STEP_BEGINS, STEP_ENDS = -1, -2

MOST_EVENTS = 1 << 14
"""Events per call of `memory_drain`."""


class Counts(ctypes.Structure):
    """Counters of one device. Peaks count since their last reset, requests since the beginning.

    Attributes:
        allocated_bytes, allocated_peak_bytes: allocated blocks, each a multiple of 512 bytes.
        reserved_bytes, reserved_peak_bytes: device memory of arenas and segments.
        arena_bytes, arena_used_bytes: arenas, and the allocated blocks in them.
        requests: requests served.
        hits: requests served at the planned address.
        missed: requests in a step with a plan that differ from the plan.
        blocked: planned requests whose address was still in use.
        apart: requests that the plan leaves to the pool.
        unplanned: requests in a step, on a stream without a plan.
        failed: requests that ran out of device memory.
        retries: requests served only after cached memory was returned to the device.
        unknown: frees of addresses that are not allocated.
        leaving: freed blocks that another stream still uses.
    """

    allocated_bytes: int
    allocated_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    arena_bytes: int
    arena_used_bytes: int
    requests: int
    hits: int
    missed: int
    blocked: int
    apart: int
    unplanned: int
    failed: int
    retries: int
    unknown: int
    leaving: int

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "allocated_bytes", "allocated_peak_bytes", "reserved_bytes", "reserved_peak_bytes", "arena_bytes",
            "arena_used_bytes", "requests", "hits", "missed", "blocked", "apart", "unplanned", "failed", "retries",
            "unknown", "leaving",
        )
    ]  # fmt: skip

    def __repr__(self) -> str:
        return f"Counts({', '.join(f'{name}={getattr(self, name)}' for name, *_ in self._fields_)})"


_INT = ctypes.c_int
_WIDE = ctypes.c_int64
_ADDRESS = ctypes.c_void_p
_TEXT = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "memory_open_host": (_ADDRESS, (_WIDE,)),
    "memory_open_cuda": (_ADDRESS, (_TEXT,)),
    "memory_close": (_WIDE, (_ADDRESS,)),
    "memory_take": (_ADDRESS, (_ADDRESS, _WIDE, _INT, _ADDRESS)),
    "memory_give": (_INT, (_ADDRESS, _ADDRESS)),
    "memory_use": (_INT, (_ADDRESS, _ADDRESS, _ADDRESS)),
    "memory_empty": (None, (_ADDRESS, _INT)),
    "memory_plan": (_INT, (_ADDRESS, _INT, _ADDRESS, _WIDE, _ADDRESS, _ADDRESS, _WIDE)),
    "memory_begin_step": (_INT, (_ADDRESS, _INT)),
    "memory_end_step": (_INT, (_ADDRESS, _INT)),
    "memory_record": (None, (_ADDRESS, _INT, _INT)),
    "memory_drain": (_WIDE, (_ADDRESS, _INT, _ADDRESS, _WIDE)),
    "memory_list": (_WIDE, (_ADDRESS, _INT, _ADDRESS, _WIDE)),
    "memory_count": (None, (_ADDRESS, _INT, ctypes.POINTER(Counts))),
    "memory_reset_peaks": (None, (_ADDRESS, _INT)),
    "memory_check": (_INT, (_ADDRESS,)),
    "memory_install": (_INT, (_ADDRESS,)),
}


class Memory:
    """An allocator of device memory. Addresses and streams are integers.

    Args:
        path: file of the library.
        runtime: file of the CUDA runtime that the process has loaded; None to allocate host memory instead.
        capacity_bytes: limit on host memory.

    Raises:
        UsageError: the file is not a CUDA runtime.
    """

    def __init__(self, path: pathlib.Path, runtime: str | None = None, capacity_bytes: int = 1 << 61) -> None:
        self._library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        opened = self._library.memory_open_host(capacity_bytes) if runtime is None else None
        if runtime is not None:
            opened = self._library.memory_open_cuda(runtime.encode())
        if opened is None:
            raise UsageError(f"{runtime} lacks functions of the CUDA runtime; leave out use_planned_allocator()")
        self._memory = opened

    def close(self) -> int:
        """Return all memory to the device, unless blocks are allocated. Returns the number of allocated blocks."""
        return int(self._library.memory_close(self._memory))

    def install(self) -> None:
        """Serve PyTorch's requests from this allocator, permanently.

        Raises:
            UsageError: another allocator is installed already.
        """
        if self._library.memory_install(self._memory) != 0:
            raise UsageError("this process has an arena already; elbowroom.use_planned_allocator() returns it")

    def take(self, nbytes: int, device: int = 0, stream: int = 0) -> int | None:
        """Allocate a block and return its address; None if memory runs out, or `nbytes` is not positive."""
        address: int | None = self._library.memory_take(self._memory, nbytes, device, stream)
        return address

    def give(self, address: int) -> bool:
        """Free a block. Returns whether an allocated block begins at `address`."""
        return bool(self._library.memory_give(self._memory, address) == 0)

    def use(self, address: int, stream: int) -> bool:
        """Record a use by another stream, as in `record_stream`. Returns whether a block begins at `address`."""
        return bool(self._library.memory_use(self._memory, address, stream) == 0)

    def empty(self, device: int = -1) -> None:
        """Return unused memory to the device; -1 for all devices."""
        self._library.memory_empty(self._memory, device)

    def plan(self, device: int, stream: int, sizes: Sequence[int], offsets: Sequence[int], nbytes: int) -> bool:
        """Plan offsets, in an arena of `nbytes`, for the requests of a stream in steps that begin with these sizes.

        A negative offset leaves a request to the pool. Returns whether the plan is well-formed and was accepted.
        """
        wide, places = np.asarray(sizes, np.int64), np.asarray(offsets, np.int64)
        if len(wide) != len(places):
            return False
        done = self._library.memory_plan(
            self._memory, device, stream, len(wide), wide.ctypes.data, places.ctypes.data, nbytes
        )
        return bool(done == 0)

    def begin_step(self, device: int = 0) -> bool:
        """Begin a step. Returns False, without effect, inside another step."""
        return bool(self._library.memory_begin_step(self._memory, device) == 0)

    def end_step(self, device: int = 0) -> bool:
        """End a step. Returns False if no step had begun."""
        return bool(self._library.memory_end_step(self._memory, device) == 0)

    def record(self, device: int, is_on: bool) -> None:
        """Start recording events, or stop and discard them."""
        self._library.memory_record(self._memory, device, is_on)

    def drain(self, device: int = 0) -> Any:
        """Return the events since the last call, as an array of `EVENT`; None if some were lost."""
        parts: list[Any] = []
        while True:
            part = np.empty(MOST_EVENTS, EVENT)
            count = self._library.memory_drain(self._memory, device, part.ctypes.data, len(part))
            if count < 0:
                return None
            parts.append(part[:count])
            if count < len(part):
                return np.concatenate(parts)

    def list_blocks(self, device: int = 0) -> Any:
        """Return the allocated blocks of a device, as an array of `EVENT`."""
        room = MOST_EVENTS
        while True:
            blocks = np.empty(room, EVENT)
            count = self._library.memory_list(self._memory, device, blocks.ctypes.data, room)
            if count <= room:
                return blocks[:count]
            room = count

    def count(self, device: int = 0) -> Counts:
        """Return the counters of a device."""
        counts = Counts()
        self._library.memory_count(self._memory, device, ctypes.byref(counts))
        return counts

    def reset_peaks(self, device: int = 0) -> None:
        """Reset the peaks to the current values."""
        self._library.memory_reset_peaks(self._memory, device)

    def check(self) -> int:
        """Check invariants; return 0, or the C source line of the check that failed."""
        return int(self._library.memory_check(self._memory))

    def find_counters(self) -> tuple[int, int, int, int]:
        """Return the addresses of the functions that count and reset peaks, and of the allocator; and how many counts
        there are."""
        functions = self.find_function("memory_count"), self.find_function("memory_reset_peaks")
        return *functions, int(self._memory), len(Counts._fields_)

    def find_function(self, name: str) -> int:
        """Return the address of a C function."""
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)
