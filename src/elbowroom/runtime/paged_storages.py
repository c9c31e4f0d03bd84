"""Storages of model state that leave memory and come back in place, and their copies in the tier below.

    RESIDENT --- evict ---> AWAY --- begin_reload ---> ARRIVING --- restore ---> RESIDENT
       ^                      '------------------- restore ------------------------'

The objects that the program, its modules and its optimizers hold stay the same; only the bytes leave. A storage that
was not written to since it was last copied leaves without a copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from elbowroom.errors import NO_ROOM, DeviceFull, Infeasible, InternalError, TierError
from elbowroom.hooks.compiled_regions import undisturbed
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.ledger import Ledger
from elbowroom.native import library
from elbowroom.runtime.copies import Copy
from elbowroom.runtime.locks import make_lock
from elbowroom.runtime.storage_copies import StorageCopies
from elbowroom.runtime.transfers import Transfers
from elbowroom.runtime.unwritten_storages import UnwrittenStorages

logger = logging.getLogger(__name__)


class PagedStorages:
    """Moves storages, whichever it is told to move.

    Args:
        transfers: moves bytes to the tier below and back.
        ledger: counts bytes on the device.
        make_room: called with the bytes of a storage before it comes back; returns the budget, None between steps.

    Attributes:
        copies: of storages in the tier below.
        table: of the extension; has a record of each storage.
        slicing: held while an op runs in slices, and reads and writes what is away; nothing is restored meanwhile by
            other threads. The lock of the step is acquired before it.
        lock: never held while memory is requested, since a thread that makes room takes it.
        offloaded_bytes, reloaded_bytes: moved so far.
        unwritten: storages that ops in slices are still to write.
        refusal: why a storage stayed that should have left; "" if none did.
    """

    def __init__(self, transfers: Transfers, ledger: Ledger, make_room: Callable[[int], int | None]) -> None:
        self._native = library.load()
        self._transfers = transfers
        self._ledger = ledger
        self._make_room = make_room
        self._arriving: dict[Any, torch.UntypedStorage] = {}
        self._restoring: dict[Any, object] = {}  # until then the copy has not been written to
        self.unwritten = UnwrittenStorages()
        self.table = self._native.StateTable(self, self.unwritten)
        self.lock = make_lock()
        self.copies = StorageCopies(transfers, self.lock)
        self.slicing = make_lock()
        self.offloaded_bytes = 0
        self.reloaded_bytes = 0
        self.refusal = ""
        self._has_warned = False

    @undisturbed
    def restore(self, record: Any) -> None:
        """Bring a storage back. Called by the extension, before an op uses it.

        Raises:
            TierError: it could not be read back. It stays away, and its copy is intact.
            Infeasible: there is no room for it.
        """
        while record.is_away and not self._restore(record):
            pass

    def _restore(self, record: Any) -> bool:
        """Bring a storage back. Return False if its copy was replaced or written to meanwhile.

        `slicing` is not held while memory is requested: making room takes the lock of the step, which the thread of an
        op in slices has already.
        """
        with self.slicing:  # another thread's op in slices comes first
            copy = self.copies.by_record.get(record)
            restoring = self._restoring.setdefault(record, object())
        if copy is None:
            return True
        contents = self._take_arriving(record)
        try:
            if contents is None:
                with self.lock:
                    budget_bytes = self._make_room(record.nbytes)
                if budget_bytes is not None and self._ledger.scope is None:  # the allocator would go beyond it
                    self.require(record.nbytes, budget_bytes)
                contents = self._reload(record, copy)
                self._transfers.finish(copy)
        except (TierError, InternalError):
            if self._restoring.get(record) is not restoring:
                return False
            raise
        with self.slicing:
            if self._restoring.get(record) is not restoring:
                return False
            record.refill(contents)
            self._restoring.pop(record, None)
        return True

    def cancel_reload(self, record: Any) -> None:
        """Give up what is on its way back of one storage, before its copy is written to."""
        self._restoring.pop(record, None)
        if self._take_arriving(record) is not None:
            self._ledger.note_move(-record.nbytes)

    def begin_copy(self, storage: torch.UntypedStorage) -> None:
        """Begin copying a storage out, unless it has a valid copy."""
        with self.lock, contextlib.suppress(TierError):  # it stays
            record = self.table.add(storage)
            if record is not None and not record.is_away and self.copies.is_missing(record):
                self._begin_copy(record, storage)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Free a storage's memory, once its copy is complete. It stays if an op uses it."""
        with self.lock:
            record = self.table.add(storage)
            if record is not None and not record.is_away:
                self.evict([record])

    def begin_reload(self, record: Any) -> None:
        """Begin bringing a storage back. If that fails, it comes back when it is used."""
        copy = self.copies.by_record.get(record)
        if copy is None or not record.is_away or record in self._arriving or record in self.unwritten.records:
            return
        restoring = self._restoring.setdefault(record, object())
        contents = None
        with contextlib.suppress(TierError, InternalError, *NO_ROOM):
            contents = self._reload(record, copy)
        if contents is None or not self.slicing.acquire(blocking=False):
            return  # an op in slices may be writing to its copy
        try:
            if self._restoring.get(record) is restoring:
                self._arriving[record] = contents
        finally:
            self.slicing.release()

    def evict(self, records: Iterable[Any]) -> int:
        """Copy storages out where needed, and free their memory. Return the bytes freed."""
        self.sweep()
        records = list(records)
        copied_before = [each for each in records if not self.copies.is_missing(each)]
        self.copies.leaving.update(records)
        try:
            freed_bytes, errors = self._move_out(records)
            if again := [each for each in copied_before if each in errors]:  # the cause may be over by now
                more_bytes, others = self._move_out(again)
                freed_bytes += more_bytes
                errors = {each: why for each, why in errors.items() if each not in again} | others
        finally:
            self.copies.leaving.difference_update(records)
        for record, why in errors.items():
            self._note_refusal(record, why)
        return freed_bytes

    def _move_out(self, records: Sequence[Any]) -> tuple[int, dict[Any, str]]:
        """Copy storages out where needed, and free their memory. Return the bytes freed, and errors by record."""
        begun: list[Any] = []
        errors: dict[Any, str] = {}
        freed_bytes = 0
        for record in records:
            storage = record.storage
            if storage is None or is_shared(storage):
                continue
            try:
                if self.copies.is_missing(record) and not self._begin_copy(record, storage):
                    continue
                begun.append(record)
            except TierError as error:
                errors[record] = str(error)
        for record in begun:
            try:
                self._transfers.finish(self.copies.by_record[record])
            except TierError as error:
                self.copies.discard(record)
                errors[record] = str(error)
                continue
            if record.empty():
                self._ledger.note_move(-record.nbytes)
                freed_bytes += record.nbytes
        return freed_bytes, errors

    def cancel_reloads(self) -> int:
        """Give up what is on its way back. Return the bytes freed."""
        freed_bytes = 0
        while self._arriving:
            record, contents = self._arriving.popitem()
            with contextlib.suppress(TierError):
                self._transfers.finish(self.copies.by_record[record])
            del contents
            self._ledger.note_move(-record.nbytes)
            freed_bytes += record.nbytes
        return freed_bytes

    def restore_all(self) -> None:
        """Bring all storages back.

        Raises:
            TierError: some of them could not be read back; the rest is there.
        """
        first: TierError | None = None
        for record in self.table.list():
            try:
                self._native.StateUse(record, False)
            except TierError as error:
                first = first or error
        try:
            if first is not None:
                raise first
        finally:
            del first  # its frames include this one

    def require(self, nbytes: int, budget_bytes: int) -> None:
        """Have room made for so many bytes.

        Raises:
            Infeasible: nothing more may leave.
        """
        with Hidden(), self._counted():
            self._ledger.require(nbytes, budget_bytes)

    def sweep(self) -> None:
        """Give up the copies of storages that are gone."""
        with self.lock:
            for record in self.table.sweep():
                self._arriving.pop(record, None)
                self._restoring.pop(record, None)
                if (copy := self.copies.by_record.pop(record, None)) is not None:
                    self._transfers.discard(copy)

    def clear(self) -> None:
        """Forget all storages, which are in memory, and give up their copies.

        Raises:
            InternalError: some are not.
        """
        if nbytes := sum(each.nbytes for each in self.copies.by_record if each.is_away and each.storage is not None):
            raise InternalError(f"{nbytes} bytes of model state are still away")
        self.table.clear()
        for copy in self.copies.by_record.values():
            self._transfers.discard(copy)
        self.copies.by_record.clear()

    def _take_arriving(self, record: Any) -> torch.UntypedStorage | None:
        """Wait for a storage that is on its way back. Returns None if there is none, or its copy failed."""
        with self.lock:
            contents = self._arriving.get(record)
            copy = self.copies.by_record.get(record)
        if contents is None or copy is None:
            return None
        try:
            self._transfers.finish(copy)
        except TierError as error:
            logger.warning("%d bytes of model state are read again: %s", record.nbytes, str(error))
            contents = None
        with self.lock:
            self._arriving.pop(record, None)
        return contents

    def _begin_copy(self, record: Any, storage: torch.UntypedStorage) -> bool:
        """Begin copying a storage out. Returns False if an op uses it, which may be writing to it."""
        if not self.copies.begin(record, storage):
            return False
        self.offloaded_bytes += record.nbytes
        return True

    def _reload(self, record: Any, copy: Copy) -> torch.UntypedStorage:
        """Begin to read a storage back, into new memory.

        Raises:
            Infeasible: there is no room for it.
        """
        with Hidden(), self._counted():
            self._ledger.note_move(record.nbytes)  # first, so that no change comes between
            try:
                contents = _reload_with_room(self._transfers, self._ledger, copy, record)
            except BaseException:
                self._ledger.note_move(-record.nbytes)
                raise
        self.reloaded_bytes += record.nbytes
        return contents

    def _note_refusal(self, record: Any, why: str) -> None:
        level = logging.DEBUG if self._has_warned else logging.WARNING
        logger.log(level, "%d bytes of model state stay in memory: %s", record.nbytes, why)
        self.refusal = why
        self._has_warned = True

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


def _reload_with_room(transfers: Transfers, ledger: Ledger, copy: Copy, record: Any) -> torch.UntypedStorage:
    """Begin to read a copy back, again after each refusal of a device while anything may leave."""
    while True:
        try:
            return transfers.reload(copy, record.misalignment)
        except DeviceFull:
            is_made = False
            with contextlib.suppress(Infeasible):  # the budget is not the reason
                is_made = ledger.make_room(record.nbytes)
            if not is_made:
                raise
