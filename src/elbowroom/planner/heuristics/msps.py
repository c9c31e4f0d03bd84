"""Chooses what to recompute by memory saved per second (MSPS), and updates the costs after each choice.

A block is recomputed from its sources: the nearest blocks that are kept. Each choice changes that for others:

    a -> b -> c      dropping b: c's source is now a, and c's time includes b's;
                     b is recomputed once more for each chosen block that is made from it

Source: X. Peng, X. Shi, H. Dai, H. Jin, W. Ma, Q. Xiong, F. Yang, X. Qian, "Capuchin: Tensor-based GPU memory
management for deep learning", ASPLOS 2020: the recomputation part of its hybrid policy, by memory saving per second
(MSPS).
"""

from __future__ import annotations

import dataclasses

from elbowroom.planner.schedule.draft import Drafter, Key

LEAST_SECONDS = 1e-12
"""Stands for a duration of zero, to keep ratios finite."""


@dataclasses.dataclass(slots=True)
class _Target:
    nbytes: int
    sources: set[Key]
    seconds: float  # of one replay from its sources
    extra_seconds: float = 0.0  # of replays for other targets

    @property
    def saving_per_second(self) -> float:
        return self.nbytes / max(self.seconds + self.extra_seconds, LEAST_SECONDS)


class Recomputation:
    """The candidates for recomputation, and the chosen ones."""

    def __init__(self, drafter: Drafter, nbytes: dict[Key, int]) -> None:
        self._drafter = drafter
        self._chosen: dict[Key, _Target] = {}
        self._left: dict[Key, _Target] = {}
        self._gaps_of: dict[int, list[Key]] = {}
        for key in sorted(drafter.gaps):
            self._gaps_of.setdefault(key[0], []).append(key)
        for key in sorted(drafter.gaps):
            gap = drafter.gaps[key]
            closure = drafter.find_closure(key[0], gap.closes, lambda storage: storage == key[0])  # noqa: B023
            if closure is not None:
                sources = {source for leaf in closure.leaves if (source := self._gap_at(leaf, gap.closes)) is not None}
                self._left[key] = _Target(nbytes[key], sources, drafter.replay.footprints.count_seconds(closure.ops))

    def _gap_at(self, storage: int, tick: int) -> Key | None:
        for key in self._gaps_of.get(storage, ()):
            if self._drafter.gaps[key].opens < tick <= self._drafter.gaps[key].closes:
                return key
        return None

    @property
    def chosen(self) -> set[Key]:
        """The gaps to be dropped."""
        return set(self._chosen)

    def best(self, among: list[Key]) -> Key | None:
        """Return the candidate among these gaps that saves most bytes per second; None if there is none."""
        offered = [key for key in among if key in self._left]
        return max(offered, key=lambda key: (self._left[key].saving_per_second, -key[0], -key[1]), default=None)

    def seconds(self, key: Key) -> float:
        """Return the time that choosing a candidate would add, including replays for others."""
        return self._left[key].seconds + self._left[key].extra_seconds

    def refuse(self, key: Key) -> None:
        """Exclude a gap from recomputation, even if it was chosen."""
        self._left.pop(key, None)
        self._chosen.pop(key, None)

    def choose(self, key: Key) -> None:
        """Choose a candidate, and update the costs of the others; a gap that is no candidate is ignored."""
        target = self._left.pop(key, None)
        if target is None:
            return
        replays = 1
        for other in self._chosen.values():
            if key in other.sources:
                other.sources.remove(key)
                other.sources |= target.sources
                replays += 1
        self._chosen[key] = target
        for candidate, other in self._left.items():
            if key in other.sources:
                other.sources.remove(key)
                other.sources |= target.sources
                other.seconds += target.seconds
                other.extra_seconds = sum(
                    other.seconds for chosen in self._chosen.values() if candidate in chosen.sources
                )
            if candidate in target.sources:
                other.extra_seconds = replays * other.seconds
