"""Moves model state out of memory and back, in place.

    RESIDENT --- make_room ---> AWAY --- an op is about to use it ---> RESIDENT

The objects that the program, its modules and its optimizers hold stay the same; only the bytes leave. A storage that
was not written to since it was last copied leaves without a copy. The extension calls `restore` before an op uses a
storage that is away (`native/state_storages.h`), and `hooks/exposed_memory.py` does so before Python's methods that
access memory without an op; other accesses raise an error.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from elbowroom.errors import TierError
from elbowroom.hooks.compiled_regions import show_regions
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared, restore_before_access
from elbowroom.hooks.grouped_step import GroupedStep, find_groupable
from elbowroom.hooks.ledger import Ledger
from elbowroom.hooks.storage_ids import get_plain_storage
from elbowroom.native import library
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.locks import make_lock
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)

SOON = 0.25
"""Share of a step's uses of state. What is used within so many is better kept than activations."""

COMING = 4
"""With Adam, parameters, gradients and optimizer state take four times the bytes of the parameters."""

GROUPS = 32
"""An optimizer updates parameters of this share of the budget at a time. With gradients, state and temporaries they
take several times as much."""

LISTS = 8
"""An op over lists of tensors (of all gradients, say) takes items of this share of the budget at a time."""


class StatePager:
    """Moves the state of one job.

    Args:
        device: device whose memory is limited. State elsewhere stays where it is.
        list_residents: returns parameters, gradients, buffers and optimizer state.
        optimizers: of the job. Those that can update a few parameters at a time do so while ops are watched.
        transfers: moves bytes to the tier below and back.
        ledger: counts bytes on the device.
        min_bytes: smaller storages stay on the device.

    Attributes:
        is_active: whether ops are watched for their use of state. Otherwise all of it is in memory.
        reloaded_bytes, offloaded_bytes, dropped_bytes: moved so far; dropped without a copy, since one existed.
        refusal: why state could not leave in the last step, if it could not; else "".
    """

    def __init__(
        self,
        device: torch.device,
        list_residents: Callable[[], list[torch.Tensor]],
        optimizers: Sequence[Optimizer],
        transfers: Transfers,
        ledger: Ledger,
        min_bytes: int,
    ) -> None:
        self._native = library.load()
        self._device = device
        self._list_residents = list_residents
        self._optimizers = optimizers
        self._grouped: list[GroupedStep] = []
        self._transfers = transfers
        self._ledger = ledger
        self._min_bytes = min_bytes
        self._table = self._native.StateTable(self)
        self._copies: dict[Any, Copy] = {}
        self._lock = make_lock()  # never held while memory is requested: whoever makes room takes it
        self._held: dict[Any, Any] = {}  # what the program knows the address of, until the next step begins
        self._budget_bytes: int | None = None
        self._thread = threading.get_ident()  # of the last step
        self._first_bytes = 0
        self._was_short = False
        self.is_active = False
        self.refusal = ""
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.dropped_bytes = 0

    # -- what the room calls --------------------------------------------------------------------------------------

    def begin_step(self, budget_bytes: int, *, may_move: bool) -> None:
        """Begin a step: move state out until what the job holds is within its budget.

        Args:
            may_move: whether the step may need state to leave. Ops are watched for that only if so, and if the state is
                large, or an earlier step had too little room.
        """
        self._budget_bytes = budget_bytes
        self._thread = threading.get_ident()
        self.refusal = ""
        self._release_held()
        missing_bytes = self._ledger.live_bytes - budget_bytes
        if self.is_active:
            self._sweep()
        if missing_bytes > 0 or (may_move and self._is_needed(budget_bytes)):
            self._activate()
        elif self.is_active and not self.count_away():
            self._deactivate()
        if self.is_active:
            self._native.update_watching()  # the step may run in another thread than the last one
            self._native.limit_lists(budget_bytes // LISTS)
            self._table.begin_step()
        if missing_bytes > 0:
            self.make_room(missing_bytes)

    def _is_needed(self, budget_bytes: int) -> bool:
        """Tell whether state may have to leave: gradients and optimizer state may be to come."""
        if self._was_short or self.is_active:
            return True
        nbytes = sum(storage.nbytes() for storage in self._list_candidates())
        self._first_bytes = self._first_bytes or nbytes
        return max(nbytes, COMING * self._first_bytes) > budget_bytes // 2

    def make_room_between_steps(self, missing_bytes: int) -> None:
        """Move state out of memory, `missing_bytes` if there are as many; what the next step uses last first."""
        self._activate()
        self._native.update_watching()
        self.make_room(missing_bytes)

    def make_room(self, missing_bytes: int, *, spares_soon: bool = False) -> int:
        """Move state out of memory, what is used last first.

        Args:
            missing_bytes: to free.
            spares_soon: leave what the next `SOON` of a step uses.

        Returns:
            The bytes that were freed, which may be fewer.
        """
        if not self.is_active:
            self._was_short = True  # ops that run now are not known to use state: it can leave in the next step
            return 0
        with self._lock:
            return self._evict(self._choose(missing_bytes, spares_soon))

    def restore(self, record: Any) -> None:
        """Bring a storage back. Called by the extension, before an op uses it.

        Raises:
            TierError: it could not be read back. It stays away, and its copy is intact.
            Infeasible: there is no room for it.
        """
        with self._lock:
            self._limit_outside_steps(record.nbytes)
            copy = self._copies.get(record)
        if copy is None or not record.is_away:
            return  # another thread has brought it back
        with Hidden(), self._counted():
            contents = self._transfers.reload(copy)
            self._transfers.finish(copy)
            record.refill(contents)
        self.reloaded_bytes += record.nbytes

    def proceed(self, event: int) -> None:
        """Make the moves that are due after an event."""

    def hold_storage(self, storage: torch.UntypedStorage, *, is_written: bool, is_lasting: bool) -> Any:
        """Bring a storage back if it is state that is away. See `exposed_memory.Restorer`.

        Raises:
            TierError, Infeasible: as for `restore`.
        """
        record = self._table.find(storage) if self.is_active else None
        if record is None:
            return None
        use = self._native.StateUse(record, is_written)
        if is_lasting:
            self._held.setdefault(record, use)
        return use

    def _hold(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Bring tensors back, and keep them as long as the result lives, if that leaves room for as much beside them.

        Raises:
            TierError, Infeasible: as for `restore`.
        """
        storages = [storage for each in tensors if (storage := get_plain_storage(each)) is not None]
        if self._budget_bytes is None or 2 * sum(each.nbytes() for each in storages) > self._budget_bytes:
            return []
        return [self.hold_storage(each, is_written=False, is_lasting=False) for each in storages]

    def _release_held(self) -> None:
        for record in self._held:
            record.is_written = True  # by its address
        self._held.clear()

    def restore_all(self) -> None:
        """Bring all state back.

        Raises:
            TierError: some of it could not be read back; the rest is there.
        """
        errors: list[TierError] = []
        for record in self._table.list():
            try:
                self._native.StateUse(record, False)
            except TierError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Bring all state back, and end.

        Raises:
            TierError: as for `restore_all`. Nothing is given up then, and the call can be repeated.
        """
        if not self.is_active:
            return
        if sys.is_finalizing():
            return  # nothing can be read back any more, and nobody is left to read it
        self._budget_bytes = None
        self.restore_all()
        self._deactivate()

    def count_away(self) -> int:
        """Return the bytes of state that are away."""
        return sum(record.nbytes for record in self._table.list() if record.is_away) if self.is_active else 0

    def is_away(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is state that is away."""
        record = self._table.find(storage) if self.is_active else None
        return record is not None and record.is_away

    # -- moves ----------------------------------------------------------------------------------------------------

    def _choose(self, missing_bytes: int, spares_soon: bool) -> list[Any]:
        """Return storages that may leave, of at least `missing_bytes` if there are as many; the last used first."""
        now, step_events = self._table.events, self._table.former_events or self._table.events
        found = []
        for storage in self._list_candidates():
            record = self._table.add(storage)
            if record is None or record.is_away or not record.is_idle:
                continue
            # Without a former step, what was used longest ago is used last.
            distance = record.count_until_use(now, step_events, (1 << 40) - record.last_use)
            found.append((distance, record))
        found.sort(key=lambda item: -item[0])
        chosen: list[Any] = []
        freed_bytes = 0
        for distance, record in found:
            if freed_bytes >= missing_bytes or (spares_soon and distance < SOON * step_events):
                break
            chosen.append(record)
            freed_bytes += record.nbytes
        return chosen

    def _list_candidates(self) -> Iterator[torch.UntypedStorage]:
        if threading.get_ident() != self._thread:
            # The thread of the step may be changing what it holds just now.
            known = [record.storage for record in self._table.list()]
            yield from (each for each in known if each is not None and not is_shared(each))
            return
        # In a first step, the parameters of the last layers are used last.
        for tensor in reversed(self._list_residents()):
            if tensor.device != self._device:
                continue
            storage = get_plain_storage(tensor)
            if storage is None or storage.nbytes() < self._min_bytes or is_shared(storage):
                continue
            yield storage

    def _evict(self, records: Iterable[Any]) -> int:
        """Copy storages out where needed, and free their memory. Return the bytes freed."""
        begun: list[Any] = []
        freed_bytes = 0
        for record in records:
            storage = record.storage
            if storage is None:
                continue
            try:
                if record.is_written or record not in self._copies:
                    self._begin_copy(record, storage)
                else:
                    self.dropped_bytes += record.nbytes
                begun.append(record)
            except TierError as error:
                self._note_refusal(record, error)
        for record in begun:
            try:
                self._transfers.finish(self._copies[record])
            except TierError as error:
                self._discard_copy(record)
                self._note_refusal(record, error)
                continue
            if record.empty():
                freed_bytes += record.nbytes
        return freed_bytes

    def _note_refusal(self, record: Any, error: TierError) -> None:
        level = logging.DEBUG if self.refusal else logging.WARNING  # once a step
        logger.log(level, "%d bytes of model state stay in memory: %s", record.nbytes, error)
        self.refusal = str(error)

    def _begin_copy(self, record: Any, storage: torch.UntypedStorage) -> None:
        self._discard_copy(record)
        record.is_written = False  # before the copy: a later write sets it again
        try:
            with Hidden():
                self._copies[record] = self._transfers.offload(storage)
        except BaseException:
            record.is_written = True
            raise
        self.offloaded_bytes += record.nbytes

    def _discard_copy(self, record: Any) -> None:
        record.is_written = True
        copy = self._copies.pop(record, None)
        if copy is not None:
            self._transfers.discard(copy)

    def _activate(self) -> None:
        """Watch ops for their use of state, from now on."""
        if self.is_active:
            return
        self.is_active = True
        show_regions()
        restore_before_access(self)
        for storage in self._list_candidates():
            self._table.add(storage)
        self._grouped = [
            GroupedStep(each, self._find_group_bytes, self._hold) for each in find_groupable(self._optimizers)
        ]

    def _find_group_bytes(self) -> int | None:
        return None if self._budget_bytes is None else self._budget_bytes // GROUPS

    def _deactivate(self) -> None:
        """Watch no more. All state is in memory."""
        self._held.clear()
        while self._grouped:
            self._grouped.pop().remove()
        self._table.clear()
        for copy in self._copies.values():
            self._transfers.discard(copy)
        self._copies.clear()
        self.is_active = False
        self._native.update_watching()

    def _sweep(self) -> None:
        """Give up the copies of storages that are gone."""
        for record in self._table.sweep():
            if (copy := self._copies.pop(record, None)) is not None:
                self._transfers.discard(copy)

    def _limit_outside_steps(self, nbytes: int) -> None:
        """Have other state leave between steps, where no request is limited."""
        if self._budget_bytes is None:
            return
        missing_bytes = self._ledger.live_bytes + nbytes - self._budget_bytes
        if missing_bytes > 0:
            self._evict(self._choose(missing_bytes, spares_soon=False))

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Have this thread's allocations count for the room, in a step or not."""
        if self._ledger.scope is None:
            yield
            return
        before = self._native.enter_scope(self._ledger.scope)
        try:
            yield
        finally:
            self._native.enter_scope(before)
