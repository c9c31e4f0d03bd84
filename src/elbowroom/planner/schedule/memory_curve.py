"""The bytes on the device at every tick, kept up to date while a strategy gives gaps up. Exact, without a simulation.

    save ... release | gone ....................... | back ... need
              (from the tick after the release, or after the last
               use by anyone else, whichever comes later)

How long anything takes never changes how many bytes are held, so a strategy can count bytes without a clock.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt

from elbowroom.planner.schedule.draft import Drafter, Key


class MemoryCurve:
    """The load curve of a step, and what giving each gap up would take off it.

    Args:
        drafter: whose gaps.
        live_bytes: the curve to begin with: that of the plain step, if nothing has been given up yet.

    Attributes:
        live: bytes at each tick.
        gone: the first tick at which the storage of a gap would be gone if it were given up at once.
        nbytes: how much that is.
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
        """Another one, which changes by itself."""
        twin = copy.copy(self)
        twin.live = self.live.copy()
        return twin

    def away(self, key: Key, release: int, back: int) -> slice:
        """The ticks at which a gap's storage is gone, if it is given up at `release` and comes back at `back`."""
        begin = max(self.gone[key], release + 1)
        return slice(begin, max(begin, back))

    def take(self, key: Key, release: int, back: int) -> None:
        """Count a storage as gone between two moves."""
        self.live[self.away(key, release, back)] -= self.nbytes[key]

    def put(self, key: Key, release: int, back: int) -> None:
        """Undo `take`."""
        self.live[self.away(key, release, back)] += self.nbytes[key]

    def take_all(self, key: Key) -> None:
        """Count a storage as gone for as long as its gap allows."""
        gap = self._gaps[key]
        self.take(key, gap.opens, gap.closes)

    def spanning(self, tick: int) -> list[Key]:
        """The gaps in which a storage can be gone at a tick.

        Cost: linear in the gaps.
        """
        return [key for key in self.keys if self.gone[key] <= tick < self._gaps[key].closes]

    @property
    def peak_tick(self) -> int:
        """Where the load is highest; the first such tick."""
        return int(np.argmax(self.live)) if len(self.live) else 0

    @property
    def peak_bytes(self) -> int:
        """The highest load."""
        return int(self.live.max(initial=0))
