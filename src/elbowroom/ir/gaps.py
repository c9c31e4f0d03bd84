"""Gaps: intervals between consecutive uses of a storage, during which it may leave the device.

tick      0        3                 9       12     end
use       |        save              need    need    |
gaps      |         '------ 0 -------''-- 1 --'      |
use       |        op                        op      |
gaps      |- - 1 -''---------- 0 ------------''- - - |      1 wraps: it opens at 12 and closes at 3 of the next step
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from elbowroom.ir.use import StorageUse, UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Interval between two uses of a storage, during which it may leave the device.

    Attributes:
        index: number of the gap among those of the storage, from 0.
        opens: tick of the use after which it may leave.
        closes: tick of the use by which it must be back; in the next step if closes <= opens.
    """

    storage: int
    index: int
    opens: int
    closes: int

    @property
    def is_wrapping(self) -> bool:
        """True if the gap closes in the next step."""
        return self.closes <= self.opens

    def covers(self, tick: int) -> bool:
        """Return True if an entry lies between the two uses."""
        if self.is_wrapping:
            return tick > self.opens or tick < self.closes
        return self.opens < tick < self.closes

    def unwrap(self, tick: int, end: int) -> int:
        """Return a tick of the gap, plus `end` (the length of a step) if it lies in the next step."""
        return tick + end if self.is_wrapping and tick < self.opens else tick

    def length(self, end: int) -> int:
        """Return the number of ticks between the two uses, in steps that end at tick `end`."""
        return self.closes - self.opens + (end if self.is_wrapping else 0)


def find_gaps(
    uses: Sequence[StorageUse], *, wraps: bool = False, held: Collection[tuple[int, int]] = ()
) -> tuple[Gap, ...]:
    """Find the gaps between the uses of one storage.

    Args:
        uses: in order of tick. A save closes no gap: autograd held nothing of the storage before it.
        wraps: whether the storage outlives the step: then the last use and the first one of the next step form a gap.
        held: ticks (begin, end) of uses between which there are no gaps.
    """
    pairs = [
        (first, second)
        for first, second in itertools.pairwise(uses)
        if second.kind is not UseKind.SAVE
        and not any(begin <= first.tick and second.tick <= end for begin, end in held)
    ]
    if wraps and uses:
        pairs.append((uses[-1], uses[0]))
    return tuple(
        Gap(storage=first.storage, index=index, opens=first.tick, closes=second.tick)
        for index, (first, second) in enumerate(pairs)
    )
