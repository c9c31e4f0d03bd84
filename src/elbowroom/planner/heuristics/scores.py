"""Priority scores of gaps that span a memory peak, and the greedy choice by them.

                 .--- limit ----.              duration of absence  (DOA): spare seconds after both copies
        ________/    memory      \\_____        area of absence      (AOA): DOA times bytes
          |-- gone ----------------|           weighted duration   (WDOA): excess over the limit, summed over the gap
                                              submodular weighted (SWDOA): WDOA with the memory use after each choice

Source: J. Zhang, S. H. Yeung, Y. Shu, B. He, W. Wang, "Efficient memory management for GPU-based deep learning
systems", 2019, the priority scores of AutoSwap, as computed in the authors' code; there DOA subtracts the time of the
copy out twice, here that of each copy once. Inferred: the submodular score, of which only the name and the idea are
known, and that a score is normalised over the candidates of one peak.
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
"""If all blocks are smaller than `MIN_BYTES`, a candidate has at least this share of the largest."""


class GapCandidates:
    """The gaps that may be chosen, as arrays: gaps in which a large storage can be gone (at `tick`, if given)."""

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
        """Return each candidate's sum of memory use over the limit, over the ticks at which it would be gone."""
        over = np.concatenate(([0], np.cumsum(live - limit_bytes)))
        return (over[self.end] - over[self.begin]).astype(np.float64)

    def spanning(self, tick: int) -> npt.NDArray[np.bool_]:
        """Return a mask of the candidates that would be gone at a tick."""
        return (self.begin <= tick) & (tick < self.end)


Scorer = Callable[[npt.NDArray[np.int64], npt.NDArray[np.bool_]], Scores]
"""Returns the scores of all candidates, given the memory use and a mask of the remaining ones; the highest is chosen.
"""


def rank(scores: Scores) -> Scores:
    """Return the position of each score in decreasing order; equal scores keep their order."""
    places = np.empty(len(scores))
    places[np.argsort(-scores, kind="stable")] = np.arange(len(scores))
    return places


def normalise(scores: Scores, among: npt.NDArray[np.bool_]) -> Scores:
    """Scale the scores so that those selected by the mask `among` lie between 0 and 1."""
    if not among.any():
        return scores
    low, high = scores[among].min(), scores[among].max()
    return (scores - low) / (high - low) if high > low else np.zeros_like(scores)


def make_scorer(candidates: GapCandidates, plain: npt.NDArray[np.int64], limit_bytes: int, score: str) -> Scorer:
    """Return a scorer by name; "wdoa" uses the plain memory use, "swdoa" the present one."""
    wdoa = candidates.wdoa(plain, limit_bytes)
    if score == "swdoa":
        return lambda live, left: candidates.wdoa(live, limit_bytes)
    if score == "vote":
        votes = -(rank(candidates.doa) + rank(candidates.aoa) + rank(wdoa))
        return lambda live, left: votes
    fixed = {"doa": candidates.doa, "aoa": candidates.aoa, "wdoa": wdoa}[score]
    return lambda live, left: fixed


def weigh(candidates: GapCandidates, limit_bytes: int, weights: tuple[float, ...]) -> Scorer:
    """Return a scorer of the weighted sum of normalised DOA, AOA, WDOA and SWDOA."""
    first: list[Scores] = []

    def score(live: npt.NDArray[np.int64], left: npt.NDArray[np.bool_]) -> Scores:
        now = candidates.wdoa(live, limit_bytes)
        if not first:
            first.append(now)  # the first call has the plain memory use
        parts = (candidates.doa, candidates.aoa, first[0], now)
        return np.asarray(sum(weight * normalise(part, left) for weight, part in zip(weights, parts, strict=True)))

    return score


def choose(
    candidates: GapCandidates,
    plain: npt.NDArray[np.int64],
    limit_bytes: int,
    scorer: Scorer,
    *,
    most_bytes: int | None = None,
) -> list[Key]:
    """Choose the best candidate that spans the peak, until memory use is within the limit or no candidate is left.

    Args:
        plain: initial memory use; it is not changed.
        most_bytes: capacity of the lower tier; None if unlimited.

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


def _has_room(candidates: GapCandidates, below: dict[int, int], most_bytes: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the candidates that still fit into the lower tier.

    All copies are counted as if they coexisted, so it may exclude too many.
    """
    room = most_bytes - sum(below.values())
    copied = np.array([key[0] in below for key in candidates.keys], dtype=np.bool_)
    return copied | (candidates.nbytes <= room)
