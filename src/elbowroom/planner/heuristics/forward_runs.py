"""Cuts the forward pass into runs: the storages that a run saves are recomputed from those that cross into it.

    saves      a   b   c | d   e   f | g   h   i          two cuts, three runs
    crossing             c           f                     kept; everything else is dropped

Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, section 4: keep
what the segments of a chain begin with. Here the cuts are placed where the fewest bytes cross.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from elbowroom.ir.plan import Choice
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.planner.schedule.draft import Draft, Drafter, Option

GROWTH = 1.25
"""Ratio of the number of runs of one draft to that of the previous one."""


def draft_runs(drafter: Drafter) -> Iterator[Draft]:
    """Yield drafts that drop everything that can be recomputed, with more and more runs.

    Cost: of each draft, linear in the ops of a run for each storage dropped.
    """
    trace = drafter.replay.trace
    if not drafter.gaps or not trace.needs:
        return
    forward_end = trace.needs[0].tick
    saves = sorted({save.tick for save in trace.saves if save.tick < forward_end})
    crossing = _Crossing(trace, forward_end)
    count = 1
    while count <= max(1, len(saves)):
        yield _drop_within(drafter, crossing, crossing.place_cuts(saves, count))
        count = max(count + 1, int(count * GROWTH))


class _Crossing:
    """Storages of the forward pass that are made before a tick and read after it."""

    def __init__(self, trace: Trace, forward_end: int) -> None:
        last_read = {
            view.storage: op.tick for op in trace.ops if op.tick < forward_end for view in op.reads
        }  # ops are in order, so the last read remains
        self._saved = {save.storage for save in trace.saves}
        self._spans = {
            storage: (trace.storages[storage].created, read)
            for storage, read in last_read.items()
            if trace.storages[storage].role not in PERSISTENT_ROLES
        }
        self._nbytes = [storage.nbytes for storage in trace.storages]
        self._trace = trace

    def place_cuts(self, saves: list[int], runs: int) -> list[int]:
        """Return the ticks of the cuts into runs that save about equally many bytes."""
        first: dict[int, int] = {}
        for save in self._trace.saves:
            first.setdefault(save.storage, save.tick)
        by_tick = dict.fromkeys(saves, 0)
        for storage, tick in first.items():
            if tick in by_tick:
                by_tick[tick] += self._nbytes[storage]
        sums = list(itertools.accumulate(by_tick.values()))
        cuts = set()
        for index in range(1, runs):
            low, high = ((index + offset) * sums[-1] / runs for offset in (-0.5, 0.5))
            near = saves[bisect.bisect_left(sums, low) : bisect.bisect_left(sums, high)]
            if near:
                cuts.add(min(near, key=self._weigh))
        return sorted(cuts)

    def _weigh(self, tick: int) -> tuple[int, int, int]:
        """Return the cost of a cut: bytes that cross unsaved, so that replays reach beyond the cut; then bytes kept."""
        reached, kept = 0, 0
        for storage in self.find(tick):
            if storage in self._saved:
                kept += self._nbytes[storage]
            else:
                reached += self._nbytes[storage]
        return reached, kept, tick

    def find(self, tick: int) -> set[int]:
        """Return the storages that cross a tick."""
        return {storage for storage, (created, read) in self._spans.items() if created < tick < read}


def _drop_within(drafter: Drafter, crossing: _Crossing, cuts: list[int]) -> Draft:
    kept = set().union(*(crossing.find(cut) for cut in cuts))
    draft: Draft = {}
    dropped: set[int] = set()
    for key, gap in sorted(drafter.gaps.items(), key=lambda item: (item[1].opens, item[0])):
        if key[1] or gap.storage in kept:
            continue
        if drafter.find_closure(gap.storage, gap.closes, dropped.__contains__) is not None:
            draft[key] = Option(Choice.RECOMPUTE)
            dropped.add(gap.storage)
    return draft
