"""A Placement: where the copies of one step lie in the tiers below the device.

offset                 a copy is there from the save or need at which its transfer begins
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
    """Where one copy lies.

    Attributes:
        storage: whose contents it is.
        begin: tick of the save or need at which its transfer begins.
        end: it is gone before this tick.
        nbytes: its size.
        is_on_disk: whether it is in the tier behind the one below the device, which had no room for it.
        offset: where it begins in its tier.
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
        copy_slots: by (storage, begin).
        lower_bytes: what they take in the tier below the device.
        disk_bytes: what they take in the tier behind that.
        piece_bytes: what passes through the tier below to the disk at a time; None for as much as there is room for.
    """

    copy_slots: tuple[CopySlot, ...] = dataclasses.field(default=(), repr=False)
    lower_bytes: int = 0
    disk_bytes: int = 0
    piece_bytes: int | None = None

    def find(self, storage: int, tick: int) -> CopySlot | None:
        """Return the slot of a storage that leaves at a tick, or shortly before its plan; None if it was to stay."""
        index = bisect.bisect_right(self.copy_slots, (storage, tick), key=_STORAGE_AND_END)
        if index == len(self.copy_slots) or self.copy_slots[index].storage != storage:
            return None
        return self.copy_slots[index]
