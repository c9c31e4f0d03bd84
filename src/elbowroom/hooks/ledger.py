"""Counts the bytes that a room's steps hold on their device, in all threads.

On a CPU a C++ extension wraps PyTorch's allocator and counts every block. On CUDA the caching allocator keeps the
counts.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from elbowroom.errors import Infeasible, MemoryRefused
from elbowroom.hooks.kept_peaks import keep_peaks
from elbowroom.native import library

logger = logging.getLogger(__name__)

NO_LIMIT = 1 << 60
"""Bytes: more than any machine has."""

POOL_PAGE_BYTES = 20 << 20
"""What the caching allocator's pool of large blocks reserves at once, at least."""

FRAGMENTED = 0.1
FRAGMENTED_BYTES = 256 << 20
"""What it may reserve beyond the budget while a step follows a plan, whose bytes are known: this share of the budget or
so many bytes, whichever is more."""

MakeRoom = Callable[[int, int], bool]
"""Called with the requested and the missing bytes. Returns True after freeing memory, returns False to let the request
pass, or raises."""


class Ledger(Protocol):
    """Counts the bytes of one room."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before, without making room. Each storage is counted once."""
        ...

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        """Count a storage that was there before until the step ends: a program may hold all its batches at once.

        Room is made for it first, as for a request.
        """
        ...

    def adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        """Adopt the storages of plain tensors as inputs. Return whether one was not counted yet."""
        ...

    @property
    def scope(self) -> Any:
        """The extension's scope on a CPU, else None."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes that the room holds now."""
        ...

    def take_recent_peak(self) -> int:
        """Return the peak of bytes held since the last call."""
        ...

    def set_limit(self, nbytes: int, *, follows_plan: bool = False) -> None:
        """Change the limit while `counting`.

        Args:
            follows_plan: whether the step's bytes are known, so that the limit is not expected to be reached.
        """
        ...

    def raise_limit(self) -> bool:
        """Leave out of the limit what the allocator cannot use of what it holds. Return whether the limit was raised.

        Called after a request was refused.
        """
        ...

    def lift_limit(self) -> None:
        """Refuse no request until `restore_limit`, unless the device is full."""
        ...

    def restore_limit(self) -> None:
        """Limit requests again."""
        ...

    def make_room(self, nbytes: int = 1) -> bool:
        """Have room made after a request of so many bytes was refused. Return whether to try again.

        Raises what the function does that `counting` was given.
        """
        ...

    def require(self, nbytes: int, limit_bytes: int) -> None:
        """Have room made for a request that comes later. Raises what `make_room` raises."""
        ...

    def counting(self, limit_bytes: int, make_room: MakeRoom) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread's allocations count for the room, within a limit.

        Args:
            limit_bytes: limit on all bytes that the room holds.
            make_room: called before a request that would exceed the limit.
        """
        ...

    def limit_between_steps(self, limit_bytes: int | None, make_room: MakeRoom | None = None) -> None:
        """Limit the bytes that the room holds until its next step begins; None for no limit. On a CPU only.

        Args:
            make_room: as for `counting`.
        """
        ...

    def has_room(self, nbytes: int, limit_bytes: int) -> bool:
        """Tell whether `nbytes` fit beside the live bytes; True if nothing is counted."""
        ...

    def note_move(self, nbytes: int) -> None:
        """Note bytes that are about to come back, or (negative) have left, during an op that they are not part of."""
        ...

    def trim(self) -> None:
        """Return free pages to the system, except those that running steps may need."""
        ...

    def close(self) -> None:
        """Stop counting."""
        ...


class CpuLedger:
    """Counts allocations of the CPU allocator.

    Allocations by threads outside any room's step count for every room. Older memory counts once it is adopted: the
    model and its optimizer's state permanently, inputs until the end of the step that reads them.

    If the system refuses memory within the limit (because of `ulimit -d`, for example), the step frees memory, too.

    Attributes:
        scope: the extension's scope, with `live_bytes` and `peak_bytes`.
        moves: times (ns) and bytes of what was noted by `note_move`; None while nobody reads them.
    """

    def __init__(self) -> None:
        self.moves: list[tuple[int, int]] | None = None
        self._native = library.load()
        self.scope: Any = self._native.make_scope()
        self._make_room: MakeRoom | None = None
        self._budget_bytes = NO_LIMIT
        self._was_refused = False
        self.scope.set_make_room(self._ask)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.scope.adopt(tensor.untyped_storage(), False)

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        return self.scope.adopt(storage, True)

    def adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        return bool(self.scope.adopt_inputs(tensors))

    @property
    def live_bytes(self) -> int:
        return int(self.scope.live_bytes)

    def take_recent_peak(self) -> int:
        return int(self.scope.take_recent_peak())

    def set_limit(self, nbytes: int, *, follows_plan: bool = False) -> None:
        self.scope.limit_bytes = min(nbytes, NO_LIMIT)

    def raise_limit(self) -> bool:
        return False

    def lift_limit(self) -> None:
        pass  # requests are refused before anything has happened

    def restore_limit(self) -> None:
        pass

    def make_room(self, nbytes: int = 1) -> bool:
        return False  # room is made before requests are refused

    def require(self, nbytes: int, limit_bytes: int) -> None:
        torch.empty(nbytes, dtype=torch.uint8)

    @contextlib.contextmanager
    def counting(self, limit_bytes: int, make_room: MakeRoom) -> Iterator[None]:
        before = self._native.enter_scope(self.scope)
        self._make_room, self._budget_bytes = make_room, min(limit_bytes, NO_LIMIT - 1)
        self.scope.limit_bytes = self._budget_bytes
        self._native.trim_pages(everywhere=False)
        try:
            yield
        finally:
            self.scope.limit_bytes, self._make_room = NO_LIMIT, None
            self.scope.drop_inputs()
            self._native.enter_scope(before)

    def limit_between_steps(self, limit_bytes: int | None, make_room: MakeRoom | None = None) -> None:
        self._make_room = make_room
        self._budget_bytes = NO_LIMIT if limit_bytes is None else limit_bytes
        self.scope.limit_bytes = self._budget_bytes

    def has_room(self, nbytes: int, limit_bytes: int) -> bool:
        return bool(self.scope.live_bytes + nbytes <= limit_bytes)

    def note_move(self, nbytes: int) -> None:
        if self.moves is not None:
            self.moves.append((time.time_ns(), nbytes))

    def _ask(self, requested_bytes: int, missing_bytes: int) -> bool:
        make_room = self._make_room  # None if the step has ended meanwhile
        if make_room is None:
            return False
        if missing_bytes == 0:
            return self._ask_for_memory(requested_bytes, make_room)
        return make_room(requested_bytes, missing_bytes)

    def _ask_for_memory(self, requested_bytes: int, make_room: MakeRoom) -> bool:
        held_bytes = self.live_bytes - requested_bytes
        refusal = MemoryRefused(requested_bytes, held_bytes, self._budget_bytes, list_system_limits())
        with contextlib.suppress(Infeasible):  # the budget is not the reason: raise MemoryRefused instead
            is_made = make_room(requested_bytes, requested_bytes)
            if is_made and not self._was_refused:
                self._was_refused = True
                logger.warning("moving more than planned: %s", refusal)
            return is_made
        raise refusal

    def trim(self) -> None:
        self._native.trim_pages(everywhere=True)

    def close(self) -> None:
        self.scope.close()
        self.trim()


class CudaLedger:
    """Reads PyTorch's caching allocator, and limits what it reserves.

    A budget counts allocated bytes, but the allocator only limits what it reserves. So once a request was refused, the
    limit leaves out what is reserved and cannot be used; the step looks at the allocated bytes after each op. A lower
    limit of the program stays in force.

    Attributes:
        moved_bytes: bytes that have come back during ops, less those that have left.
    """

    scope = None

    def __init__(self, device: torch.device) -> None:
        keep_peaks()
        self._native = library.load()
        self._device, self._name = device, str(device)
        self._total_bytes = torch.cuda.get_device_properties(device).total_memory
        self._fraction: float | None = None  # of the program; None outside of steps, or if the allocator knows none
        self._make_room: MakeRoom | None = None
        self._limit_bytes = NO_LIMIT
        self._beyond_bytes = 0  # may be reserved beyond the limit
        self._is_lifted = False
        self.moved_bytes = 0

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        pass

    def adopt_input(self, storage: torch.UntypedStorage) -> object:
        pass

    def adopt_inputs(self, tensors: list[torch.Tensor]) -> bool:
        return False

    @property
    def live_bytes(self) -> int:
        return self.count_bytes()[0]

    def count_bytes(self) -> tuple[int, int, int, int]:
        """Return the allocated bytes and their peak, and the reserved ones and theirs.

        `torch.cuda.memory_stats` takes a hundred times as long.
        """
        allocated, peak, reserved, reserved_peak = self._native.count_device_bytes(self._name)
        return allocated, peak, reserved, reserved_peak

    def read_peaks(self) -> tuple[int, int]:
        """Return the peaks of the allocated and of the reserved bytes since `begin_peaks`."""
        _, allocated, _, reserved = self.count_bytes()
        kept_allocated, kept_reserved = self._native.find_step_peaks(self._name)
        return max(allocated, kept_allocated), max(reserved, kept_reserved)

    def begin_peaks(self) -> None:
        """Begin with new peaks. Those that the program reads stay."""
        self._native.begin_peaks(self._name)

    def reset_peaks(self) -> None:
        """Reset the allocator's peaks, for what runs next. Those of `read_peaks` go on."""
        self._native.reset_peaks(self._name)

    def take_recent_peak(self) -> int:
        return self.live_bytes  # the allocator keeps one peak, which the step's meter resets and reads

    def set_limit(self, nbytes: int, *, follows_plan: bool = False) -> None:
        self._limit_bytes = nbytes
        self._beyond_bytes = max(FRAGMENTED_BYTES, int(FRAGMENTED * nbytes)) if follows_plan else 0
        self._limit_reserved()

    def raise_limit(self) -> bool:
        allocated_bytes, _, reserved_bytes, _ = self.count_bytes()
        idle_bytes = reserved_bytes - allocated_bytes  # after a refusal: in parts of pages
        if self._fraction is None or idle_bytes + POOL_PAGE_BYTES <= self._beyond_bytes:
            return False
        self._beyond_bytes = idle_bytes + POOL_PAGE_BYTES
        self._limit_reserved()
        return True

    def lift_limit(self) -> None:
        self._is_lifted = True
        self._limit_reserved()

    def restore_limit(self) -> None:
        self._is_lifted = False
        self._limit_reserved()

    def _limit_reserved(self) -> None:
        if self._fraction is not None:
            share = (self._limit_bytes + self._beyond_bytes) / self._total_bytes
            fraction = self._fraction if self._is_lifted else min(self._fraction, share)
            torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    @contextlib.contextmanager
    def counting(self, limit_bytes: int, make_room: MakeRoom) -> Iterator[None]:
        try:
            self._fraction = torch.cuda.get_per_process_memory_fraction(self._device)
        except RuntimeError:  # a pluggable allocator
            self._fraction = None
        self._make_room = make_room
        self._is_lifted = False
        try:
            yield
        finally:
            self._make_room = None
            if self._fraction is not None:
                torch.cuda.set_per_process_memory_fraction(self._fraction, self._device)
                self._fraction = None

    def make_room(self, nbytes: int = 1) -> bool:
        return self.raise_limit() or (self._make_room is not None and self._make_room(nbytes, 1))

    def require(self, nbytes: int, limit_bytes: int) -> None:
        while (missing_bytes := self.live_bytes + nbytes - limit_bytes) > 0:
            if self._make_room is None or not self._make_room(nbytes, missing_bytes):
                return

    def limit_between_steps(self, limit_bytes: int | None, make_room: MakeRoom | None = None) -> None:
        pass

    def has_room(self, nbytes: int, limit_bytes: int) -> bool:
        return self.live_bytes + nbytes <= limit_bytes

    def note_move(self, nbytes: int) -> None:
        self.moved_bytes += nbytes

    def trim(self) -> None:
        torch.cuda.empty_cache()  # no other process can use what the caching allocator keeps

    def close(self) -> None:
        pass


def list_system_limits() -> list[tuple[str, int, int]]:
    """List the system's limits on this process's memory: name, limit in bytes, bytes in use."""
    import resource  # CpuLedger runs on Linux only, but other systems import this module, too

    with open("/proc/self/status") as file:
        taken = dict(line.split(":", 1) for line in file)
    found = []
    for name, field in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        limit_bytes, _ = resource.getrlimit(getattr(resource, name))
        if limit_bytes != resource.RLIM_INFINITY:
            found.append((name, limit_bytes, int(taken[field].split()[0]) << 10))
    return found


def make_ledger(device: torch.device) -> CpuLedger | CudaLedger:
    """Return the ledger for a device.

    Raises:
        UsageError: the extension for the CPU can be neither found nor compiled.
    """
    return CudaLedger(device) if device.type == "cuda" else CpuLedger()
