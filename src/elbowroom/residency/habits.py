"""What earlier steps teach: when what is saved at some place of a step will be needed.

    earlier step   save 0  save 1  save 2  need 2  need 1  need 0
    this step      save 0  save 1  save 2   ^ now: 1 is needed in one event, 0 in two

Steps are told apart by nothing: a save is the same as one of the step before if it comes at the same place and has as
many bytes. Where that is wrong, what it says is worth less, and does no harm. Time is counted in saves and needs, which
last as long in a step that is slower.
"""

from __future__ import annotations

from bisect import bisect_right


class Habits:
    """Remembers one step while the next one goes on."""

    def __init__(self) -> None:
        self._before: list[tuple[int, list[int]]] = []  # bytes of each save, and the events at which it was needed
        self._present: list[tuple[int, list[int]]] = []
        self._places: dict[int, list[int]] = {}
        self._events = 0

    def begin(self) -> None:
        """A step begins. One without any need teaches nothing."""
        if any(needs for _, needs in self._present):
            self._before = self._present
        self._present, self._places, self._events = [], {}, 0

    def saved(self, storage: int, nbytes: int) -> None:
        """A storage was saved."""
        self._places.setdefault(storage, []).append(len(self._present))
        self._present.append((nbytes, []))
        self._events += 1

    def needed(self, storage: int) -> None:
        """A storage was needed."""
        for place in self._places.get(storage, ()):
            self._present[place][1].append(self._events)
        self._events += 1

    def freed(self, storage: int) -> None:
        """A storage will not be needed again; its number may stand for another one from now on."""
        self._places.pop(storage, None)

    def next_use(self, storage: int) -> int | None:
        """In how many events a storage will be needed, going by the step before; None if that says nothing."""
        found: int | None = None
        for place in self._places.get(storage, ()):
            if place >= len(self._before):
                continue
            nbytes, needs = self._before[place]
            after = bisect_right(needs, self._events - 1)
            if nbytes != self._present[place][0] or after == len(needs):
                continue
            events = needs[after] - self._events + 1
            found = events if found is None else min(found, events)
        return found
