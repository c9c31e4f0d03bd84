"""Blocks for copies: in host memory, or in a spill file when host memory is full."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from elbowroom.errors import TierFull
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.runtime.copies import Record
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs, SlabBlock

logger = logging.getLogger(__name__)


class TierBlocks:
    """Reserves and frees blocks.

    Args:
        host: first destination of copies.
        spill: destination when `host` is full; None for none.
        wait: waits for all transfers in host memory.
    """

    def __init__(self, host: HostSlabs, spill: SpillFile | None, wait: Callable[[], None]) -> None:
        self._host = host
        self._spill = spill
        self._wait = wait

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        """Prepare for the placement of the next step's copies. `gives_back`: as for `Transfers`."""
        self._host.prepare(placement.lower_bytes, gives_back=gives_back, settle=self._wait)
        if self._spill is not None:
            self._spill.prepare(placement.disk_bytes, gives_back=gives_back)

    def reserve(self, nbytes: int, copy_slot: CopySlot | None) -> SlabBlock | int:
        """Reserve a block of host memory, or of the spill file, in the planned slot if that is free.

        Raises:
            TierFull: there is no room.
        """
        at, is_for_disk = (None, False) if copy_slot is None else (copy_slot.offset, copy_slot.is_on_disk)
        if not is_for_disk or self._spill is None:
            try:
                return self.reserve_in_memory(nbytes, None if is_for_disk else at)
            except TierFull:
                if self._spill is None:
                    raise
        return self._spill.reserve(nbytes, at if is_for_disk else None)

    def reserve_in_memory(self, nbytes: int, at: int | None = None) -> SlabBlock:
        """Reserve a block of host memory.

        Raises:
            TierFull: there is no room.
        """
        try:
            return self._host.reserve(nbytes, at)
        except TierFull:
            if not self._host.fits_after_release(nbytes):
                raise
        # Empty slabs are too small. Wait for transfers in them, then free them for a larger slab.
        logger.debug("freeing empty slabs of host memory for a block of %d bytes", nbytes)
        self._wait()
        self._host.release_empty()
        return self._host.reserve(nbytes)

    def free(self, record: Record) -> None:
        """Free the block of a record."""
        if isinstance(record.block, SlabBlock):
            self._host.free(record.block)
        else:
            assert self._spill is not None
            self._spill.free(record.block, record.nbytes)

    def restore(self, records: Sequence[Record], others: Sequence[SlabBlock]) -> None:
        """Have exactly the blocks of these records reserved, and others of host memory."""
        self._host.restore([*(each.block for each in records if isinstance(each.block, SlabBlock)), *others])
        if self._spill is not None:
            there = [each for each in records if not isinstance(each.block, SlabBlock)]
            self._spill.restore([(each.block, each.nbytes) for each in there])

    def close(self) -> None:
        """Give all of it back to the system."""
        self._host.close()
        if self._spill is not None:
            self._spill.close()
