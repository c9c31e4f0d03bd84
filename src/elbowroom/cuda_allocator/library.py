"""The library's functions, as `memory.h` declares them."""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from elbowroom.errors import UsageError

EVENT = np.dtype([("nbytes", np.int64), ("serial", np.int64), ("stream", np.uint64), ("segment", np.uint64)])
"""What was recorded: bytes that were taken, 0 for a block given back, or one of the two below; the block's number, its
stream, and where its segment begins: 0 in an arena."""

STEP_BEGINS, STEP_ENDS = -1, -2

MOST_EVENTS = 1 << 14
"""Handed over at a time."""


class Counts(ctypes.Structure):
    """What the library has counted on one device. Peaks are since they were last reset, requests since the beginning.

    Attributes:
        allocated_bytes, allocated_peak_bytes: in blocks that are handed out, each a multiple of 512 bytes.
        reserved_bytes, reserved_peak_bytes: taken from the device, arenas and segments together.
        arena_bytes, arena_used_bytes: arenas, and the blocks in them that are handed out.
        requests: that were served.
        hits: of them, at the address that was planned.
        missed: in a step with a plan, and not what the plan has there.
        blocked: what the plan has there, but something is still in its place.
        apart: left to the pool by the plan: blocks that outlive the step after.
        unplanned: in a step, on a stream without a plan.
        failed: not served: the device has no room.
        retries: served only after memory was given back to the device.
        unknown: addresses that were given back and are not handed out.
        leaving: blocks that were given back, and another stream still works on.
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
    """Device memory handed out block by block. Addresses and streams are numbers.

    Args:
        path: of the library.
        runtime: file of a CUDA runtime that the process has loaded; None for host memory in its place.
        capacity_bytes: of host memory.

    Raises:
        UsageError: the file is no CUDA runtime.
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
            raise UsageError(f"{runtime} has not what a CUDA runtime has: PyTorch's own allocator has to do")
        self._memory = opened

    def close(self) -> int:
        """Give everything back to the device, unless blocks are handed out. Returns how many are."""
        return int(self._library.memory_close(self._memory))

    def install(self) -> None:
        """Be the memory that the functions for PyTorch hand out, for good.

        Raises:
            UsageError: there is one already.
        """
        if self._library.memory_install(self._memory) != 0:
            raise UsageError("this process has an arena already; elbowroom.use_planned_allocator() returns it")

    def take(self, nbytes: int, device: int = 0, stream: int = 0) -> int | None:
        """The address of a block; None if there is no room, or for no bytes."""
        address: int | None = self._library.memory_take(self._memory, nbytes, device, stream)
        return address

    def give(self, address: int) -> bool:
        """Take a block back. Returns whether one that is handed out begins there."""
        return bool(self._library.memory_give(self._memory, address) == 0)

    def use(self, address: int, stream: int) -> bool:
        """Another stream works on a block. Returns whether one that is handed out begins there."""
        return bool(self._library.memory_use(self._memory, address, stream) == 0)

    def empty(self, device: int = -1) -> None:
        """Give what nobody uses back to the device; -1 is all of them."""
        self._library.memory_empty(self._memory, device)

    def plan(self, device: int, stream: int, sizes: Sequence[int], offsets: Sequence[int], nbytes: int) -> bool:
        """Have the requests of a stream, in steps that begin like this, at these offsets of an arena of `nbytes`.

        A negative offset leaves a request to the pool. Returns whether the plan was taken: it has to be well-formed.
        """
        wide, places = np.asarray(sizes, np.int64), np.asarray(offsets, np.int64)
        if len(wide) != len(places):
            return False
        done = self._library.memory_plan(
            self._memory, device, stream, len(wide), wide.ctypes.data, places.ctypes.data, nbytes
        )
        return bool(done == 0)

    def begin_step(self, device: int = 0) -> bool:
        """A step begins. Returns whether none had begun."""
        return bool(self._library.memory_begin_step(self._memory, device) == 0)

    def end_step(self, device: int = 0) -> bool:
        """A step ends. Returns whether one had begun."""
        return bool(self._library.memory_end_step(self._memory, device) == 0)

    def record(self, device: int, is_on: bool) -> None:
        """Write down what happens from now on, or stop and forget it."""
        self._library.memory_record(self._memory, device, is_on)

    def drain(self, device: int = 0) -> Any:
        """What was recorded since it was last asked for, as an array of `EVENT`; None if some of it was lost."""
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
        """The blocks that are handed out on a device, as an array of `EVENT`."""
        room = MOST_EVENTS
        while True:
            blocks = np.empty(room, EVENT)
            count = self._library.memory_list(self._memory, device, blocks.ctypes.data, room)
            if count <= room:
                return blocks[:count]
            room = count

    def count(self, device: int = 0) -> Counts:
        """What has been counted so far."""
        counts = Counts()
        self._library.memory_count(self._memory, device, ctypes.byref(counts))
        return counts

    def reset_peaks(self, device: int = 0) -> None:
        """Let the peaks begin anew."""
        self._library.memory_reset_peaks(self._memory, device)

    def check(self) -> int:
        """0 if the library's books agree with each other; otherwise the line of the check that failed."""
        return int(self._library.memory_check(self._memory))

    def find_function(self, name: str) -> int:
        """The address of one of the library's functions."""
        return int(ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0)
