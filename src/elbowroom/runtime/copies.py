"""Copies in the tier below, and the record of which block each of them has."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from elbowroom.errors import TierError


class Copy(Protocol):
    """The contents of a storage in the tier below, and the state of its last transfer."""

    nbytes: int


class Record(weakref.ref[Any]):
    """A copy, and its block in the tier below: an offset, or a block of host memory; None until one is reserved.

    Attributes:
        block: as above.
        nbytes: of the copy.
    """

    __slots__ = ("block", "nbytes")

    block: Any
    nbytes: int


class Records:
    """Which blocks are taken, and by which copies.

    An exception may end a change at any line: Ctrl-C, or no memory. So a copy is recorded before its block is reserved,
    and what a change has left halfway is restored from the records before the next one. A copy that is dropped without
    being discarded is noticed by its death. To be used by one thread at a time.

    Args:
        restore: has the tier begin anew with the blocks of these records.
        on_death: called with the record of a copy that is no more. At any moment, in any thread.
    """

    def __init__(self, restore: Callable[[list[Record]], None], on_death: Callable[[Any], object]) -> None:
        self._restore, self._on_death = restore, on_death
        self._records: set[Record] = set()
        self._is_whole = True  # False during a change, and after one that was ended halfway

    def __len__(self) -> int:
        return len(self._records)

    def reserve(self, copy: Copy, take: Callable[[], Any]) -> Record:
        """Record a copy, with the block that `take` returns.

        Raises:
            TierError: as `take` does; then nothing is recorded.
        """
        record = Record(copy, self._on_death)
        record.block, record.nbytes = None, copy.nbytes
        self.repair()
        self._records.add(record)
        try:
            with self.changing():
                record.block = take()
        except TierError:
            self._records.discard(record)
            raise
        return record

    def free(self, record: Record, give: Callable[[Record], None]) -> None:
        """Have `give` free the block of a copy, once."""
        self.repair()  # before the end of this change is taken for the end of the one that was ended halfway
        if record not in self._records:
            return
        with self.changing():
            if record.block is not None:
                give(record)
            self._records.discard(record)

    def changing(self) -> _Changing:
        """A context in which what is taken changes. Errors of the tier's own leave it whole."""
        return _Changing(self)

    def repair(self) -> None:
        """If the last change was ended halfway, begin anew with what the living copies have."""
        if not self._is_whole:
            self._records = {record for record in self._records if record() is not None}
            self._restore([record for record in self._records if record.block is not None])
            self._is_whole = True

    def list_lost(self) -> Iterator[Record]:
        """Return the records whose copies were garbage-collected."""
        return iter([record for record in self._records if record() is None])


class _Changing:
    __slots__ = ("_records",)

    def __init__(self, records: Records) -> None:
        self._records = records

    def __enter__(self) -> None:
        self._records._is_whole = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._records._is_whole = kind is None or issubclass(kind, TierError)
