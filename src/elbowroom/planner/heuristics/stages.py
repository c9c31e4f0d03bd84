"""Cuts the forward pass into stages of similar bytes; each is recomputed from the storages that cross into it.

    saves      a   b   c | d   e   f | g   h   i          two cuts, three stages
    crossing             c           f                     kept; everything else is dropped

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, algorithm 3. The
paper takes the possible cuts as given. Inferred: here every save is one, and among those at which a stage holds between
its budget and half as much again, the cut that the fewest bytes cross is taken.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.planner.schedule.draft import Draft, Drafter, Option

LEEWAY = 1.5
"""Most bytes of a stage, as a multiple of its budget, in exchange for a cheaper cut."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Cuts of the forward pass.

    Attributes:
        kept: storages that cross a cut.
        kept_bytes: bytes of those that autograd saves.
        largest_bytes: the most bytes saved within one stage.
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
        # Bytes that cross each tick; row 1: saved by autograd, row 0: the others.
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
        """Bytes that the forward pass saves."""
        return sum(self._saves.values())

    @property
    def saved_count(self) -> int:
        """Number of storages that the forward pass saves."""
        return sum(nbytes > 0 for nbytes in self._saves.values())

    def cut(self, budget_bytes: float) -> Stages:
        """Cut once a stage exceeds the budget, nearby where the fewest bytes cross."""
        kept: set[int] = set()
        held, largest = 0, 0
        best: tuple[tuple[int, int, int], int] | None = None  # (cost of the cut, bytes of the stage up to it)
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
        """Return the bytes that cross unsaved, so that replays reach beyond the cut; and the bytes that are kept."""
        reached, kept = self._crossing[:, tick]
        return int(reached), int(kept)

    def _find_crossing(self, tick: int) -> set[int]:
        """Return the storages made before a tick and read after it."""
        return {storage for storage, (created, read) in self._spans.items() if created < tick < read}


def draft_stages(drafter: Drafter, stages: Stages) -> Draft:
    """Drop every storage that is not kept and can be replayed.

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
