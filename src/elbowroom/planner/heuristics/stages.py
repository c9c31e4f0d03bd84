"""Cuts the forward pass into stages of about so many bytes, each computed again from what crosses into it.

    saves      a   b   c | d   e   f | g   h   i          two cuts, three stages
    crossing             c           f                     kept; everything else is dropped

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, algorithm 3. The
paper is given the places where a cut may be. Inferred: here every save may be one, and of those at which a stage holds
between its budget and half as much again, the one across which the least goes is taken.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.planner.schedule.draft import Draft, Drafter, Option

LEEWAY = 1.5
"""The most a stage may hold, in its budget, for the sake of a cheaper cut."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Where the forward pass is cut.

    Attributes:
        kept: storages that cross a cut.
        kept_bytes: of those that autograd saves.
        largest_bytes: the most that is saved within one stage.
    """

    kept: frozenset[int]
    kept_bytes: int
    largest_bytes: int


class Cutter:
    """Cuts one trace."""

    def __init__(self, trace: Trace) -> None:
        end = trace.needs[0].tick if trace.needs else trace.end
        read = {view.storage: op.tick for op in trace.ops if op.tick < end for view in op.reads}
        self._spans = {
            storage: (trace.storages[storage].created, last)
            for storage, last in read.items()
            if trace.storages[storage].role not in PERSISTENT_ROLES
        }
        self._nbytes = [storage.nbytes for storage in trace.storages]
        self._saved = {save.storage for save in trace.saves}
        # Bytes that cross each tick, those that autograd saves apart from the others.
        change = np.zeros((2, trace.end + 2), dtype=np.int64)
        for storage, (created, last) in self._spans.items():
            if created + 1 < last:
                kind = int(storage in self._saved)
                change[kind, created + 1] += self._nbytes[storage]
                change[kind, last] -= self._nbytes[storage]
        self._crossing = np.cumsum(change, axis=1)
        self._saves: dict[int, int] = {}  # bytes saved for the first time, by tick
        seen: set[int] = set()
        for save in trace.saves:
            if save.tick < end:
                is_new = save.storage not in seen and trace.storages[save.storage].role not in PERSISTENT_ROLES
                self._saves[save.tick] = self._nbytes[save.storage] if is_new else 0
                seen.add(save.storage)

    @property
    def saved_bytes(self) -> int:
        """What the forward pass saves."""
        return sum(self._saves.values())

    @property
    def saved_count(self) -> int:
        """How many storages that is."""
        return sum(nbytes > 0 for nbytes in self._saves.values())

    def cut(self, budget_bytes: float) -> Stages:
        """Cut as soon as a stage holds more than the budget, near there where the least crosses."""
        kept: set[int] = set()
        held, largest = 0, 0
        best: tuple[tuple[int, int, int], int] | None = None  # (what a cut costs, bytes of the stage up to it)
        for tick, nbytes in self._saves.items():
            if best is not None and held + nbytes > budget_bytes * LEEWAY:
                (_, _, where), upto = best
                kept |= self._find_crossing(where)
                largest = max(largest, upto)
                held, best = held - upto, None
            held += nbytes
            if held > budget_bytes:
                cost = (*self._weigh(tick), tick)
                if best is None or cost < best[0]:
                    best = cost, held
        return Stages(
            kept=frozenset(kept),
            kept_bytes=sum(self._nbytes[storage] for storage in kept & self._saved),
            largest_bytes=max(largest, held),
        )

    def _weigh(self, tick: int) -> tuple[int, int]:
        """Bytes that cross and are not saved, so that replays reach beyond the cut; and bytes that are kept."""
        reached, kept = self._crossing[:, tick]
        return int(reached), int(kept)

    def _find_crossing(self, tick: int) -> set[int]:
        """What is made before a tick and read after it."""
        return {storage for storage, (created, read) in self._spans.items() if created < tick < read}


def draft_stages(drafter: Drafter, stages: Stages) -> Draft:
    """Drop everything that is not kept and can be replayed.

    Cost: for each storage dropped, linear in the ops of its stage.
    """
    draft: Draft = {}
    dropped: set[int] = set()
    for key, gap in sorted(drafter.gaps.items(), key=lambda item: (item[1].opens, item[0])):
        if key[1] or gap.storage in stages.kept:
            continue
        if drafter.find_closure(gap.storage, gap.closes, dropped.__contains__) is not None:
            draft[key] = Option(Choice.RECOMPUTE)
            dropped.add(gap.storage)
    return draft
