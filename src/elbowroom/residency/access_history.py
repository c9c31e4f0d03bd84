"""What earlier steps teach: when what is saved at some place of a step will be needed, and how much room a step takes.

    earlier step   save 0  save 1  save 2  need 2  need 1  need 0
    this step      save 0  save 1  save 2   ^ now: 1 is needed in one event, 0 in two

Steps are told apart by nothing: a save is the same as one of the step before if it comes at the same place and has as
many bytes. Where that is wrong, what it says is worth less, and does no harm. Time is counted in saves and needs, which
last as long in a step that is slower.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from typing import Any

NEVER = 1 << 60
"""An event that does not come."""


@dataclasses.dataclass(slots=True, eq=False)
class AccessPattern:
    """What became of one thing that was saved.

    Attributes:
        place: its first save was the step's so-and-so-many-th.
        events: at which it was saved and needed, in order.
        needs: those at which it was needed.
        free: the event from which on nothing but autograd held it, as far as was seen.
        own_seconds, own_bytes: to compute it from `leaves`; infinite if that cannot be done, or nobody asked.
        leaves: places of what it is computed from.
        learnt: how often somebody asked, in this step and those before.
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
    """One step.

    Attributes:
        saves: a use for each save; the same one where a thing is saved again, and `NEVER_NEEDED_AGAIN` for all that may
        not leave. needs: how many there were. seconds: by event, those that the step's own ops had taken by then.
        demand_bytes: by event, most that would have been there since the event before, had nothing left. level_bytes:
        by event, what would have been there just then, had nothing left. was_tight: whether there was ever too little
        room. end_seconds: that had passed at the last event. is_foreseen: whether what was foreseen for it decided;
        else a plan did.
    """

    saves: list[AccessPattern] = dataclasses.field(default_factory=list)
    needs: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)
    demand_bytes: list[int] = dataclasses.field(default_factory=lambda: [0])
    level_bytes: list[int] = dataclasses.field(default_factory=list)
    was_tight: bool = False
    end_seconds: float = 0.0
    is_foreseen: bool = False

    def find_shape(self) -> tuple[int, ...]:
        """Bytes of all saves: what steps are told apart by."""
        return tuple(use.nbytes for use in self.saves)


class AccessHistory:
    """Remembers one step while the next one goes on.

    Args:
        is_bounded: whether there may be too little room below the device.

    Attributes:
        before, present: the step before, and this one.
        tried: what was foreseen for steps of each shape, and what became of them; anything, to this class.
        was_short: whether there has ever been too little room.
    """

    def __init__(self, *, is_bounded: bool = False) -> None:
        self._is_bounded = is_bounded
        self.tried: dict[object, Any] = {}
        self.was_short, self._steps = False, 0
        self.before, self.present = StepAccesses(), StepAccesses()
        self._uses: dict[int, list[AccessPattern]] = {}

    @property
    def may_rest(self) -> bool:
        """Whether it will do if what a step makes first can be offloaded alone: there was a step before this one, and
        never too little room."""
        return self._steps > 1 and not self.was_short and not self._is_bounded

    @property
    def events(self) -> int:
        """Saves and needs of this step so far."""
        return len(self.present.demand_bytes) - 1

    def begin(self) -> None:
        """A step begins. One without any need teaches nothing."""
        self._steps += 1
        if self.present.needs:
            self.before = self.present
        self.present, self._uses = StepAccesses(), {}

    def demand(self, nbytes: int) -> None:
        """Since the last event there would have been so much, had nothing left."""
        demand = self.present.demand_bytes
        if nbytes > demand[-1]:
            demand[-1] = nbytes

    def saved(self, storage: int, nbytes: int | None, seconds: float = 0.0, level_bytes: int = 0) -> AccessPattern:
        """A storage was saved, when the step's own ops had taken so long and so much would have been there.

        Of one that may not leave (`nbytes` is None) only matters that there was a save; steps are full of them.
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
        """A storage was needed."""
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
        """A storage will not be needed again; its number may stand for another one from now on."""
        self._uses.pop(storage, None)

    def find(self, storage: int) -> AccessPattern | None:
        """What is known of a storage in this step."""
        uses = self._uses.get(storage)
        return uses[0] if uses else None

    def find_before(self, storage: int) -> AccessPattern | None:
        """What became of it in the step before; None if that says nothing."""
        use = self.find(storage)
        if use is None or use.place >= len(self.before.saves):
            return None
        found = self.before.saves[use.place]
        return found if found.nbytes == use.nbytes else None

    def next_use(self, storage: int) -> int | None:
        """In how many events a storage will be needed, going by the step before; None if that says nothing."""
        before = self.find_before(storage)
        if before is None:
            return None
        after = bisect_right(before.needs, self.events - 1)
        return None if after == len(before.needs) else before.needs[after] - self.events + 1
