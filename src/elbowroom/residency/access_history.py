"""Access history: predicts the next use of saved storages, and memory demand, from the previous step.

    previous step   save 0  save 1  save 2  need 2  need 1  need 0
    this step       save 0  save 1  save 2   ^ now: 1 is needed in one event, 0 in two

A save matches the save of the previous step with the same index, if both have the same bytes. A wrong match makes a
prediction less useful, never incorrect results. Time is counted in events (saves and needs), so that it does not depend
on the speed of a step.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from typing import Any

NEVER = 1 << 60
"""The index of an event that never happens."""


@dataclasses.dataclass(slots=True, eq=False)
class AccessPattern:
    """The accesses to one saved storage in a step.

    Attributes:
        place: index of its first save among the saves of the step.
        events: events that save or need it, in order.
        needs: events that need it.
        free: first event since which only autograd holds it, as far as observed.
        own_seconds, own_bytes: cost of computing it from `leaves`; infinite seconds if that is impossible or unknown.
        leaves: `place` of each storage that it is computed from.
        learnt: how often the cost was looked up, in this step and earlier ones.
    """

    place: int
    nbytes: int
    events: list[int] = dataclasses.field(default_factory=list)
    needs: list[int] = dataclasses.field(default_factory=list)
    free: int = NEVER
    own_seconds: float = math.inf
    own_bytes: int = 0
    leaves: tuple[int, ...] = ()
    learnt: int = 0


NEVER_NEEDED_AGAIN = AccessPattern(NEVER, 0)


@dataclasses.dataclass(slots=True, eq=False)
class StepAccesses:
    """The accesses of one step. Bytes are counted as if nothing had been evicted.

    Attributes:
        saves: pattern of each save; one pattern if a storage is saved again, and `NEVER_NEEDED_AGAIN` for storages that
            may not leave.
        needs: number of needs.
        seconds: by event, seconds that the step's own ops have taken.
        demand_bytes: by event, peak bytes since the previous event.
        level_bytes: by event, bytes at the event.
        was_tight: whether memory was ever short.
        end_seconds: elapsed seconds at the last event.
        is_foreseen: whether a prefetch plan decided on evictions; else a plan did.
    """

    saves: list[AccessPattern] = dataclasses.field(default_factory=list)
    needs: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    demand_bytes: list[int] = dataclasses.field(default_factory=lambda: [0])
    level_bytes: list[int] = dataclasses.field(default_factory=list)
    was_tight: bool = False
    end_seconds: float = 0.0
    is_foreseen: bool = False

    @property
    def is_whole(self) -> bool:
        """True unless an interrupt came as an event was recorded."""
        return len(self.seconds) == len(self.level_bytes) == len(self.demand_bytes) - 1

    def find_shape(self) -> tuple[int, ...]:
        """Return the bytes of all saves, by which steps are distinguished."""
        return tuple(use.nbytes for use in self.saves)


class AccessHistory:
    """Records the accesses of a step, and keeps those of the previous step.

    Args:
        is_bounded: whether the tier below the device may run out of space.

    Attributes:
        before, present: the previous step and the current one.
        tried: prefetch plans tried for steps of each shape, with their outcomes; opaque to this class.
        was_short: whether memory has ever been short.
    """

    def __init__(self, *, is_bounded: bool = False) -> None:
        self.is_bounded = is_bounded
        self.tried: dict[object, Any] = {}
        self.was_short, self._steps = False, 0
        self.before, self.present = StepAccesses(), StepAccesses()
        self._uses: dict[int, list[AccessPattern]] = {}

    @property
    def may_rest(self) -> bool:
        """Tell whether the first results of a step need not be recomputable, only offloadable: a step came before this
        one, and memory has never been short."""
        return self._steps > 1 and not self.was_short and not self.is_bounded

    @property
    def events(self) -> int:
        """Number of saves and needs in this step so far."""
        return len(self.present.demand_bytes) - 1

    def begin(self) -> None:
        """Begin a step. The previous step is kept only if it had needs."""
        self._steps += 1
        if self.present.needs and self.present.is_whole:
            self.before = self.present
        self.present, self._uses = StepAccesses(), {}

    def demand(self, nbytes: int) -> None:
        """Record bytes on the device since the last event, counted as if nothing had been evicted."""
        demand = self.present.demand_bytes
        if nbytes > demand[-1]:
            demand[-1] = nbytes

    def saved(self, storage: int, nbytes: int | None, seconds: float = 0.0, level_bytes: int = 0) -> AccessPattern:
        """Record a save, with the seconds that the step's own ops have taken and the bytes at the time.

        For a storage that may not leave (`nbytes` is None), only the event is recorded; most saves are of this kind.
        """
        saves = self.present.saves
        if nbytes is None:
            saves.append(NEVER_NEEDED_AGAIN)
            self._count(seconds, level_bytes)
            return NEVER_NEEDED_AGAIN
        uses = self._uses.setdefault(storage, [])
        use = uses[0] if uses and uses[0].nbytes == nbytes else AccessPattern(len(saves), nbytes)
        if use not in uses:
            uses.append(use)
        use.events.append(self.events)
        saves.append(use)
        self._count(seconds, level_bytes)
        return use

    def needed(self, storage: int, seconds: float = 0.0, level_bytes: int = 0) -> None:
        """Record a need."""
        for use in self._uses.get(storage, ()):
            use.events.append(self.events)
            use.needs.append(self.events)
        self.present.needs += 1
        self._count(seconds, level_bytes)

    def _count(self, seconds: float, level_bytes: int) -> None:
        record = self.present
        record.seconds.append(max(seconds, record.seconds[-1]) if record.seconds else seconds)
        record.level_bytes.append(level_bytes)
        record.demand_bytes.append(0)

    def freed(self, storage: int) -> None:
        """Forget a storage that is not needed again; its id may be reused from now on."""
        self._uses.pop(storage, None)

    def find(self, storage: int) -> AccessPattern | None:
        """Return the pattern of a storage in this step; None if it has not been saved."""
        uses = self._uses.get(storage)
        return uses[0] if uses else None

    def find_before(self, storage: int) -> AccessPattern | None:
        """Return the matching pattern of the previous step; None if there is none."""
        use = self.find(storage)
        if use is None or use.place >= len(self.before.saves):
            return None
        found = self.before.saves[use.place]
        return found if found.nbytes == use.nbytes else None

    def next_use(self, storage: int) -> int | None:
        """Predict in how many events a storage is needed, from the previous step; None if that is unknown."""
        before = self.find_before(storage)
        return None if before is None else self.count_until_need(before)

    def count_until_need(self, before: AccessPattern) -> int | None:
        """Return in how many events a storage is needed that has this pattern in the previous step; None for never."""
        events = self.events
        after = bisect_right(before.needs, events - 1)
        return None if after == len(before.needs) else before.needs[after] - events + 1
