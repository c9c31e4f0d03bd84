"""What each gap would cost by itself: the seconds of a replay, and which choices it has at all."""

from __future__ import annotations

import numpy as np

from elbowroom.simulator.columns import Array, Columns
from elbowroom.simulator.compiled import compiled
from elbowroom.simulator.segments import KEEP, RECOMPUTE, Segments, find_segments


@compiled
def price_replays(columns: Columns, room: Segments) -> Array:
    """Seconds of recomputing each gap when nothing else is dropped; infinite where that cannot be done.

    Cost: linear in the gaps times the trace's gaps; each looks at its own replay only.
    """
    seconds = np.full(len(columns.gaps), np.inf)
    for gap in range(len(seconds)):
        room.moves[gap].choice = KEEP
    for gap in range(len(seconds)):
        room.moves[gap].choice = RECOMPUTE
        if find_segments(columns, room) < 0:
            seconds[gap] = room.segments[0].seconds
        room.moves[gap].choice = KEEP
    return seconds
