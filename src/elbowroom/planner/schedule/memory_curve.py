"""Device memory at every tick, updated as a strategy evicts storages in gaps. Exact, without a simulation.

    save ... release | gone ....................... | back ... need
              (from the tick after the release, or after the last
               other use of the storage, whichever comes later)

The number of bytes held does not depend on how long anything takes, so a strategy can count bytes without a clock.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from elbowroom.planner.schedule.draft import Drafter, Key


class MemoryCurve:
    """The memory curve of a step, and the bytes that eviction in each gap would free.

    Args:
        drafter: provides the gaps.
        live_bytes: the initial curve: that of the plain step, if nothing has been evicted yet.

    Attributes:
        live: bytes at each tick.
        gone: by gap, the first tick at which its storage is gone if it is released as soon as the gap opens.
        nbytes: by gap, the bytes that this frees.
        keys: the gaps, sorted.
    """

    def __init__(self, drafter: Drafter, live_bytes: npt.ArrayLike) -> None:
        trace, rounded = drafter.replay.trace, drafter.replay.rounded
        self.live: npt.NDArray[np.int64] = np.array(live_bytes, dtype=np.int64)
        self.keys = tuple(sorted(drafter.gaps))
        self.nbytes = {key: int(rounded[key[0]]) for key in self.keys}
        self.gone: dict[Key, int] = {}
        nodes: dict[int, list[tuple[int, int]]] = {}
        for need in trace.needs:
            nodes.setdefault(trace.saves[need.save].storage, []).append((need.tick, need.released))
        for key in self.keys:
            gap, home = drafter.gaps[key], trace.storages[key[0]]
            held = (released for tick, released in nodes[key[0]] if tick <= gap.opens)
            self.gone[key] = max(gap.opens + 1, home.released, *held)
        self._gaps = drafter.gaps

    def copy(self) -> MemoryCurve:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin.live = self.live.copy()
        return twin

    def away(self, key: Key, release: int, back: int) -> slice:
        """Return the ticks at which a gap's storage is gone, if it is released at `release` and returns at `back`."""
        begin = max(self.gone[key], release + 1)
        return slice(begin, max(begin, back))

    def take(self, key: Key, release: int, back: int) -> None:
        """Subtract a storage for the ticks between its release and its return."""
        self.live[self.away(key, release, back)] -= self.nbytes[key]

    def put(self, key: Key, release: int, back: int) -> None:
        """Undo `take`."""
        self.live[self.away(key, release, back)] += self.nbytes[key]

    def take_all(self, key: Key) -> None:
        """Subtract a storage for its whole gap."""
        gap = self._gaps[key]
        self.take(key, gap.opens, gap.closes)

    def spanning(self, tick: int) -> list[Key]:
        """Return the gaps in which a storage can be gone at a tick.

        Cost: linear in the gaps.
        """
        return [key for key in self.keys if self.gone[key] <= tick < self._gaps[key].closes]

    @property
    def peak_tick(self) -> int:
        """The first tick at which memory use is highest."""
        return int(np.argmax(self.live)) if len(self.live) else 0

    @property
    def peak_bytes(self) -> int:
        """The highest memory use."""
        return int(self.live.max(initial=0))
