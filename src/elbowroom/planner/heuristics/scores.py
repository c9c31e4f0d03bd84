"""Priority scores of gaps that span a peak, and the greedy choice by them.

                 .--- limit ----.              duration of absence  (DOA): seconds to spare after both copies
        ________/    load        \\_____        area of absence      (AOA): the same, times bytes
          |-- gone ----------------|           weighted duration   (WDOA): by how far the load is over the limit
                                              submodular weighted (SWDOA): the same, against the load after each pick

Source: J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient memory management for GPU-based deep learning
systems", 2019, the priority scores of AutoSwap, as computed in the authors' code; there DOA takes the time of the copy
out twice, here that of each copy once. Inferred: the submodular score, of which only the name and the idea are known,
and that a score is normalised over the candidates of one peak.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve

Scores = npt.NDArray[np.float64]

MIN_BYTES = 1 << 20
"""Smaller blocks are no candidates."""

SHARE_OF_LARGEST = 1 / 64
"""Where every block is smaller than that, a candidate has at least this share of the largest."""


class Candidates:
    """The gaps that may be chosen, in columns: those in which something large can be gone (at `tick`, if given)."""

    def __init__(self, drafter: Drafter, load: MemoryCurve, tick: int | None = None) -> None:
        sizes = load.nbytes
        largest = max(sizes.values(), default=0)
        least = MIN_BYTES if largest >= MIN_BYTES else largest * SHARE_OF_LARGEST
        offered = load.spanning(tick) if tick is not None else load.keys
        self.keys: tuple[Key, ...] = tuple(
            key for key in offered if sizes[key] >= least and load.gone[key] < drafter.gaps[key].closes
        )
        self.begin = np.array([load.gone[key] for key in self.keys], dtype=np.int64)
        self.end = np.array([drafter.gaps[key].closes for key in self.keys], dtype=np.int64)
        self.nbytes = np.array([sizes[key] for key in self.keys], dtype=np.int64)
        link, begins = drafter.replay.costs.link, drafter.begins
        spare = []
        for key in self.keys:
            gap, nbytes = drafter.gaps[key], drafter.replay.trace.storages[key[0]].nbytes
            copies = offload_seconds(link, nbytes) + reload_seconds(link, nbytes)
            spare.append(begins[gap.closes] - begins[gap.opens] - copies)
        self.doa: Scores = np.array(spare, dtype=np.float64)
        sizes_or_one = np.maximum(self.nbytes, 1)
        self.aoa: Scores = np.where(self.doa >= 0, self.doa * sizes_or_one, self.doa / sizes_or_one)

    def wdoa(self, live: npt.NDArray[np.int64], limit_bytes: int) -> Scores:
        """How far the load is over the limit, summed over the ticks at which each would be gone."""
        over = np.concatenate(([0], np.cumsum(live - limit_bytes)))
        return (over[self.end] - over[self.begin]).astype(np.float64)

    def spanning(self, tick: int) -> npt.NDArray[np.bool_]:
        """Which would be gone at a tick."""
        return (self.begin <= tick) & (tick < self.end)


Scorer = Callable[[npt.NDArray[np.int64], npt.NDArray[np.bool_]], Scores]
"""Scores of all candidates, given the load now and which of them are still to be had; the highest is taken."""


def rank(scores: Scores) -> Scores:
    """The place of each when sorted from the highest down; equal scores by position."""
    places = np.empty(len(scores))
    places[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return places


def normalise(scores: Scores, among: npt.NDArray[np.bool_]) -> Scores:
    """Scaled so that those `among` which we choose lie between 0 and 1."""
    if not among.any():
        return scores
    low, high = scores[among].min(), scores[among].max()
    return (scores - low) / (high - low) if high > low else np.zeros_like(scores)


def make_scorer(candidates: Candidates, plain: npt.NDArray[np.int64], limit_bytes: int, score: str) -> Scorer:
    """The scorer of a name: "doa", "aoa", "wdoa" (against the plain load), "swdoa" (against the load now) or "vote"."""
    wdoa = candidates.wdoa(plain, limit_bytes)
    if score == "swdoa":
        return lambda live, left: candidates.wdoa(live, limit_bytes)
    if score == "vote":
        votes = -(rank(candidates.doa) + rank(candidates.aoa) + rank(wdoa))
        return lambda live, left: votes
    fixed = {"doa": candidates.doa, "aoa": candidates.aoa, "wdoa": wdoa}[score]
    return lambda live, left: fixed


def weigh(candidates: Candidates, limit_bytes: int, weights: tuple[float, ...]) -> Scorer:
    """Normalised DOA, AOA, WDOA and SWDOA, weighted; SWDOA always against the load now."""
    seen: list[Scores] = []

    def score(live: npt.NDArray[np.int64], left: npt.NDArray[np.bool_]) -> Scores:
        now = candidates.wdoa(live, limit_bytes)
        if not seen:
            seen.append(now)  # the first load seen is the plain one
        parts = (candidates.doa, candidates.aoa, seen[0], now)
        return np.asarray(sum(weight * normalise(part, left) for weight, part in zip(weights, parts, strict=True)))

    return score


def choose(
    candidates: Candidates,
    plain: npt.NDArray[np.int64],
    limit_bytes: int,
    scorer: Scorer,
    *,
    most_bytes: int | None = None,
) -> list[Key]:
    """Take the best candidate spanning the highest load again and again, until that is under the limit or none is left.

    Args:
        plain: the load before; it is not changed.
        most_bytes: what the tier below holds; None for any amount.

    Cost: for each choice, linear in ticks and candidates.
    """
    live = plain.copy()
    left = np.ones(len(candidates.keys), dtype=np.bool_)
    chosen: list[Key] = []
    below: dict[int, int] = {}
    while len(live) and int(live.max()) > limit_bytes:
        offered = left & candidates.spanning(int(np.argmax(live)))
        if most_bytes is not None:
            offered &= _has_room(candidates, below, most_bytes)
        if not offered.any():
            break
        best = int(np.argmax(np.where(offered, scorer(live, offered), -np.inf)))
        left[best] = False
        chosen.append(candidates.keys[best])
        below[candidates.keys[best][0]] = int(candidates.nbytes[best])
        live[candidates.begin[best] : candidates.end[best]] -= candidates.nbytes[best]
    return chosen


def _has_room(candidates: Candidates, below: dict[int, int], most_bytes: int) -> npt.NDArray[np.bool_]:
    """Which would still fit below. Counted as if all copies were there at once, so it may refuse too many."""
    room = most_bytes - sum(below.values())
    there = np.array([key[0] in below for key in candidates.keys], dtype=np.bool_)
    return there | (candidates.nbytes <= room)
