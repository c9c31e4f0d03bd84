"""Counts a room's bytes on CUDA, where the caching allocator keeps the counts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from elbowroom.hooks.kept_peaks import keep_peaks
from elbowroom.hooks.ledger import NO_LIMIT, MakeRoom
from elbowroom.hooks.memory_fractions import find_fractions
from elbowroom.native import library

POOL_PAGE_BYTES = 20 << 20
"""What the caching allocator's pool of large blocks reserves at once, at least."""

FRAGMENTED = 0.1
FRAGMENTED_BYTES = 256 << 20
"""What it may reserve beyond the budget while a step follows a plan, whose bytes are known: this share of the budget or
so many bytes, whichever is more."""


class CudaLedger:
    """Reads PyTorch's caching allocator, and limits what it reserves.

    A budget counts allocated bytes, but the allocator only limits what it reserves. So once a request was refused, the
    limit leaves out what is reserved and cannot be used; the step looks at the allocated bytes after each op. A lower
    limit of the program stays in force.

    Attributes:
        refusals: as for `Ledger`.
        moved_bytes: bytes that have come back during ops, less those that have left.
    """

    scope = None

    def __init__(self, device: torch.device) -> None:
        keep_peaks()
        self._native = library.load()
        self._name = str(device)
        self._fractions = find_fractions(self._name)
        self._may_limit = False  # in a step, if the allocator can limit what it reserves
        self._make_room: MakeRoom | None = None
        self._limit_bytes = NO_LIMIT
        self._beyond_bytes = 0  # may be reserved beyond the limit
        self._fragmented_bytes = FRAGMENTED_BYTES  # the same in steps that follow a plan, at least
        self._follows_plan = False
        self._is_lifted = False
        self.moved_bytes = 0
        self.refusals: list[str] = []

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
        self._follows_plan = follows_plan
        self._beyond_bytes = max(self._fragmented_bytes, int(FRAGMENTED * nbytes)) if follows_plan else 0
        self._limit_reserved()

    def raise_limit(self) -> bool:
        allocated_bytes, _, reserved_bytes, _ = self.count_bytes()
        idle_bytes = reserved_bytes - allocated_bytes  # after a refusal: in parts of pages
        if not self._may_limit or idle_bytes + POOL_PAGE_BYTES <= self._beyond_bytes:
            return False
        self._beyond_bytes = idle_bytes + POOL_PAGE_BYTES
        if self._follows_plan:  # the next step takes as much, and a refusal waits for the device
            self._fragmented_bytes = self._beyond_bytes
        self._limit_reserved()
        return True

    def lift_limit(self) -> None:
        self._is_lifted = True
        self._limit_reserved()

    def restore_limit(self) -> None:
        self._is_lifted = False
        self._limit_reserved()

    def _limit_reserved(self) -> None:
        if self._may_limit:
            total_bytes = torch.cuda.get_device_properties(self._name).total_memory
            share = (self._limit_bytes + self._beyond_bytes) / total_bytes
            self._fractions.limit(self, share, is_lifted=self._is_lifted)

    @contextlib.contextmanager
    def counting(self, limit_bytes: int, make_room: MakeRoom) -> Iterator[None]:
        self._may_limit = self._fractions.enter(self)
        self._make_room = make_room
        self._is_lifted = False
        try:
            yield
        finally:
            self._make_room = None
            self._may_limit = False
            self._fractions.leave(self)

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
        self._fragmented_bytes = FRAGMENTED_BYTES
        torch.cuda.empty_cache()  # no other process can use what the caching allocator keeps

    def close(self) -> None:
        pass
