"""Gaps: the stretches between the uses of a storage, in which it may be away from the device.

tick      0        3                 9       12     end
use       |        save              need    need    |
gaps      |         '------ 0 -------''-- 1 --'      |
use       |        op                        op      |
gaps      |- - 1 -''---------- 0 ------------''- - - |      1 wraps: it opens at 12 and closes at 3 of the next step
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from elbowroom.ir.use import StorageUse, UseKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The stretch between two uses of a storage, during which it may be away.

    Attributes:
        index: counts the storage's gaps from 0.
        opens: tick of the use after which it may leave.
        closes: tick of the use by which it must be back; of the next step if that is not after `opens`.
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
        """Tell whether an entry lies between the two uses."""
        if self.is_wrapping:
            return tick > self.opens or tick < self.closes
        return self.opens < tick < self.closes

    def unwrap(self, tick: int, end: int) -> int:
        """Count a tick on from `opens`, in steps that end at tick `end`: those of the next step come after `end`."""
        return tick + end if self.is_wrapping and tick < self.opens else tick

    def length(self, end: int) -> int:
        """Count the ticks from one use to the other, in steps that end at tick `end`."""
        return self.closes - self.opens + (end if self.is_wrapping else 0)


def find_gaps(uses: Sequence[StorageUse], *, wraps: bool = False) -> tuple[Gap, ...]:
    """Find the gaps between the uses of one storage.

    Args:
        uses: in order of tick. A save closes no gap: autograd held nothing of the storage before it.
        wraps: whether the storage outlives the step: then the first use of the next step follows the last of this one.
    """
    pairs = [(first, second) for first, second in itertools.pairwise(uses) if second.kind is not UseKind.SAVE]
    if wraps and uses:
        pairs.append((uses[-1], uses[0]))
    return tuple(
        Gap(storage=first.storage, index=index, opens=first.tick, closes=second.tick)
        for index, (first, second) in enumerate(pairs)
    )
