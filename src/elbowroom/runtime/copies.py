"""Copies in the tier below, and the records of their blocks."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from elbowroom.errors import TierError


class Copy(Protocol):
    """Copy of a storage in the tier below, with the state of its last transfer."""

    nbytes: int


class Extents(NamedTuple):
    """Bytes of a storage's copy, and where they are in the memory of a section: runs at equal distances.

    Attributes:
        copy_offset: of the first run in the copy, and so in the storage.
        memory_offset: of the first run in the section's own storage.
        run_bytes: bytes of each run.
        dimensions: number of runs along each dimension, the outermost first, and their distances in the copy and in
            memory.
    """

    copy_offset: int
    memory_offset: int
    run_bytes: int
    dimensions: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return self.run_bytes * math.prod(count for count, _, _ in self.dimensions)

    def list_runs(self) -> Iterator[tuple[int, int]]:
        """Yield the offsets of each run in the copy and in memory."""
        for place in itertools.product(*(range(count) for count, _, _ in self.dimensions)):
            copy_offset, memory_offset = self.copy_offset, self.memory_offset
            for index, (_, copy_stride, memory_stride) in zip(place, self.dimensions, strict=True):
                copy_offset += index * copy_stride
                memory_offset += index * memory_stride
            yield copy_offset, memory_offset


class Record(weakref.ref[Any]):
    """Weak reference to a copy, with the block that it occupies.

    Attributes:
        block: offset, or block of host memory; None until one is reserved.
        nbytes: size of the copy.
    """

    __slots__ = ("block", "nbytes")

    block: Any
    nbytes: int


class Records:
    """Records of the copies in a tier.

    An exception (Ctrl-C, out of memory) may interrupt a change at any line. So a copy is recorded before its block is
    reserved, and after an interrupted change the tier is rebuilt from the records. A copy that is garbage-collected
    without being discarded is reported to `on_death`. For one thread at a time.

    Args:
        restore: rebuilds the tier from the blocks of the given records.
        on_death: called with the record of a garbage-collected copy, at any moment, in any thread.
    """

    def __init__(self, restore: Callable[[list[Record]], None], on_death: Callable[[Any], object]) -> None:
        self._restore, self._on_death = restore, on_death
        self._records: set[Record] = set()
        self._is_whole = True  # False during a change, and after an interrupted one
        self._changing = _Changing(self)

    def __len__(self) -> int:
        return len(self._records)

    def reserve(self, copy: Copy, take: Callable[[], Any]) -> Record:
        """Record a copy, with the block that `take` returns.

        Raises:
            TierError: raised by `take`; then nothing is recorded.
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
        """Have `give` free the block of a copy. Does nothing the second time."""
        self.repair()  # first, since a completed change marks the records as whole
        if record not in self._records:
            return
        with self.changing():
            if record.block is not None:
                give(record)
            self._records.discard(record)

    def changing(self) -> _Changing:
        """Return a context for a change. Only errors other than `TierError` count as an interruption."""
        return self._changing

    def repair(self) -> None:
        """Rebuild the tier from the living copies if the last change was interrupted."""
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
        self._records = weakref.proxy(records)

    def __enter__(self) -> None:
        self._records._is_whole = False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._records._is_whole = kind is None or issubclass(kind, TierError)
