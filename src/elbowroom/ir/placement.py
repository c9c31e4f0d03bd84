"""Placement: offsets of the copies of one step in the tiers below the device.

offset                 a copy lives from the save or need at which its transfer begins
  |   +-------------+  to the end of autograd's claim on the storage
  |---+---+   |     |
  |       |   |-----+--
  +-------+---+-------- tick
"""

from __future__ import annotations

import bisect
import dataclasses
import operator

_STORAGE_AND_END = operator.attrgetter("storage", "end")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CopySlot:
    """Lifetime and offset of one copy.

    Attributes:
        storage: the storage that is copied.
        begin: tick of the save or need at which its transfer begins.
        end: the copy is freed before this tick.
        nbytes: size of the copy.
        is_on_disk: whether it lies in the second tier below the device, since the first has no room for it.
        offset: in its tier.
    """

    storage: int
    begin: int
    end: int
    nbytes: int
    is_on_disk: bool = False
    offset: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The copies of one step.

    Attributes:
        copy_slots: sorted by (storage, begin).
        lower_bytes: size of their arena in the tier below the device.
        disk_bytes: size of their arena in the tier below that.
        piece_bytes: bytes staged in the tier below on the way to the disk, at a time; None for as many as fit.
    """

    copy_slots: tuple[CopySlot, ...] = dataclasses.field(default=(), repr=False)
    lower_bytes: int = 0
    disk_bytes: int = 0
    piece_bytes: int | None = None

    def find(self, storage: int, tick: int) -> CopySlot | None:
        """Return the slot of a storage that leaves at or somewhat before the planned tick; None if none is planned."""
        index = bisect.bisect_right(self.copy_slots, (storage, tick), key=_STORAGE_AND_END)
        if index == len(self.copy_slots) or self.copy_slots[index].storage != storage:
            return None
        return self.copy_slots[index]
