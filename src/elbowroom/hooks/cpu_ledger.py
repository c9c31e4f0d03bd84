"""Counts a room's bytes on a CPU, where a C++ extension wraps PyTorch's allocator and counts every block."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from elbowroom.errors import Infeasible, MemoryRefused
from elbowroom.hooks.counted_storages import count_new_storages
from elbowroom.hooks.ledger import NO_LIMIT, MakeRoom
from elbowroom.hooks.loaded_memory import find_loaded
from elbowroom.native import library

logger = logging.getLogger(__name__)


class CpuLedger:
    """Counts allocations of the CPU allocator.

    Allocations by threads outside any room's step count for every room. Older memory counts once it is adopted: the
    model and its optimizer's state permanently, inputs until the end of the step that reads them.

    If the system refuses memory within the limit (because of `ulimit -d`, for example), the step frees memory, too.

    Attributes:
        scope: the extension's scope, with `live_bytes` and `peak_bytes`.
        refusals: as for `Ledger`.
        moves: times (ns) and bytes of what was noted by `note_move`; None while nobody reads them.
    """

    def __init__(self) -> None:
        self.moves: list[tuple[int, int]] | None = None
        self.refusals: list[str] = []
        self._native = library.load()
        self.scope: Any = self._native.make_scope()
        self._make_room: MakeRoom | None = None
        self._budget_bytes = NO_LIMIT
        self._has_warned = False
        self._asked = [self]  # cleared when it is closed: the scope is never freed
        self.scope.set_make_room(_make_asker(self._asked))
        count_new_storages()

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
        for storage in storages:
            self.scope.adopt(storage, False)
        on_cpu = (each for each in storages if each.device.type == "cpu")
        for storage, is_mapped in find_loaded(on_cpu):
            self.scope.own_loaded(storage, is_mapped)

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
        torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    @contextlib.contextmanager
    def counting(self, limit_bytes: int, make_room: MakeRoom) -> Iterator[None]:
        scopes = _find_open_scopes()
        scopes.append(self.scope)
        self._native.enter_scope(self.scope)
        self._make_room, self._budget_bytes = make_room, min(limit_bytes, NO_LIMIT - 1)
        self.scope.limit_bytes = self._budget_bytes
        self._native.trim_pages(everywhere=False)
        try:
            yield
        finally:
            self.scope.limit_bytes, self._make_room = NO_LIMIT, None
            self.scope.drop_inputs()
            if self.scope in scopes:
                scopes.remove(self.scope)
            if scopes is _find_open_scopes():  # not in another thread
                self._native.enter_scope(scopes[-1] if scopes else None)

    def limit_between_steps(self, limit_bytes: int | None, make_room: MakeRoom | None = None) -> None:
        self._make_room = make_room
        self._budget_bytes = NO_LIMIT if limit_bytes is None else limit_bytes
        self.scope.limit_bytes = self._budget_bytes

    def has_room(self, nbytes: int, limit_bytes: int) -> bool:
        return bool(self.scope.live_bytes + nbytes <= limit_bytes)

    def note_move(self, nbytes: int) -> None:
        if self.moves is not None:
            self.moves.append((time.time_ns(), nbytes))

    def ask(self, requested_bytes: int, missing_bytes: int) -> bool:
        """Make room for a request. Return whether there is any now. Called by the extension."""
        make_room = self._make_room  # None if the step has ended meanwhile
        if make_room is None:
            return False
        if missing_bytes == 0:
            return self._ask_for_memory(requested_bytes, make_room)
        return make_room(requested_bytes, missing_bytes)

    def _ask_for_memory(self, requested_bytes: int, make_room: MakeRoom) -> bool:
        held_bytes = self.live_bytes - requested_bytes
        with contextlib.suppress(Infeasible):  # the budget is not the reason: raise MemoryRefused instead
            is_made = make_room(requested_bytes, requested_bytes)
            if is_made and not self._has_warned:
                self._has_warned = True
                logger.warning("moving more than planned: %s", self._describe_refusal(requested_bytes, held_bytes))
            return is_made
        raise self._describe_refusal(requested_bytes, held_bytes)

    def _describe_refusal(self, requested_bytes: int, held_bytes: int) -> MemoryRefused:
        return MemoryRefused(requested_bytes, held_bytes, self._budget_bytes, list_system_limits())

    def trim(self) -> None:
        self._native.trim_pages(everywhere=True)

    def close(self) -> None:
        self._asked.clear()
        self._make_room = None
        self.scope.close()
        self.trim()


def _make_asker(ledgers: list[CpuLedger]) -> Callable[[int, int], bool]:
    """Return what a scope calls to make room. `ledgers`: one, or none any more."""

    def ask(requested_bytes: int, missing_bytes: int) -> bool:
        for each in ledgers:  # without a frame of its own, which the error would keep
            return each.ask(requested_bytes, missing_bytes)
        return False

    return ask


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


_thread = threading.local()


def _find_open_scopes() -> list[Any]:
    """Return the scopes of this thread's running steps. These need not end in the order in which they began."""
    found: list[Any] = _thread.__dict__.setdefault("scopes", [])
    return found
