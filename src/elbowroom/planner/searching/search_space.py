"""The search space of a problem: which gaps to decide on, their permitted choices, and which are similar."""

from __future__ import annotations

import numpy as np

from elbowroom._numba_loops import compiled
from elbowroom.planner.searching.annealing import SearchSpace
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.segment_arrays import Segments
from elbowroom.simulator.compiled_loops.segments import CHOICES, KEEP, RECOMPUTE, add_segment

MOST_TICKETS = 8
"""The largest gaps are drawn this many times as often as the smallest."""


def find_search_space(columns: Columns, budget_bytes: int, room: Segments) -> SearchSpace:
    """Return the gaps whose absence frees bytes where the plain step exceeds the budget, and their allowed choices."""
    gaps, events = columns.gaps, columns.events
    begin = np.maximum(events["after"][gaps["open_event"]], gaps["free"])
    end = np.maximum(events["at"][gaps["close_event"]], begin)
    crowded = np.concatenate(([0], np.cumsum(columns.slots > budget_bytes)))
    matters = np.flatnonzero(crowded[end] - crowded[begin] > 0)
    seconds = price_replays(columns, room)
    allowed = np.ones((len(gaps), CHOICES), dtype=np.bool_)
    allowed[:, RECOMPUTE:] = np.isfinite(seconds)[:, None]
    looks = [(int(gaps["payload"][gap]), float(np.round(seconds[gap], 9))) for gap in matters]
    order = sorted(range(len(matters)), key=lambda index: (looks[index], int(gaps["opens"][matters[index]])))
    kinds: dict[tuple[int, float], int] = {}
    alike = matters[order]
    place = np.full(len(gaps), -1)
    place[alike] = np.arange(len(alike))
    in_time = matters[np.lexsort((matters, gaps["opens"][matters]))]
    rank = np.full(len(gaps), -1)
    rank[in_time] = np.arange(len(in_time))
    weight = gaps["rounded"][matters] / max(1, gaps["rounded"][matters].max(initial=1))
    tickets = np.clip(np.ceil(MOST_TICKETS * np.sqrt(weight)), 1, MOST_TICKETS).astype(np.int64)
    return SearchSpace(
        gaps=np.repeat(matters, tickets),
        allowed=allowed,
        alike=alike,
        place=place,
        kind=np.asarray([kinds.setdefault(looks[index], len(kinds)) for index in order], dtype=np.int64),
        in_time=in_time,
        rank=rank,
    )


@compiled
def price_replays(columns: Columns, room: Segments) -> Array:
    """Return the seconds of recomputing each gap if nothing else is dropped; infinite if that is impossible."""
    seconds = np.full(len(columns.gaps), np.inf)
    for gap in range(len(seconds)):
        room.moves[gap].choice, room.moves[gap].segment = KEEP, -1
        room.moves[gap].wanted = columns.gaps[gap].closes
    for gap in range(len(seconds)):
        room.moves[gap].choice = RECOMPUTE
        room.tally[0].segments = room.tally[0].ops = room.tally[0].leaves = 0
        if add_segment(columns, gap, room):
            seconds[gap] = room.segments[0].seconds
        room.moves[gap].choice, room.moves[gap].segment = KEEP, -1
    return seconds
