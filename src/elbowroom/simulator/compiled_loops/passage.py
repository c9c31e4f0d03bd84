"""Peak bytes of a replay: the compiled counterpart of `replays.footprint`."""

from __future__ import annotations

from elbowroom._numba_loops import internal
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.segment_arrays import Segments


@internal
def walk(columns: Columns, ops: Array, segment: int, room: Segments) -> None:
    """Return the seconds of a replay, and its peak bytes beyond the outputs that stay."""
    marks = room.marks
    stamp = room.tally[0].stamp
    storages = columns.storages
    for position in range(len(ops)):
        op = ops[position]
        for index in range(columns.ops[op].reads_start, columns.ops[op + 1].reads_start):
            marks[columns.reads[index].storage].last_use = position
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            marks[columns.writes[index]].last_use = position
    live = 0
    peak = 0
    stays = 0
    seconds = 0.0
    for position in range(len(ops)):
        op = ops[position]
        seconds += columns.ops[op].seconds
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            storage = columns.writes[index]
            if marks[storage].leaf != stamp and marks[storage].live != stamp:
                marks[storage].live = stamp
                live += storages[storage].rounded
        peak = max(peak, live + columns.ops[op].workspace)
        for index in range(columns.ops[op].reads_start, columns.ops[op + 1].reads_start):
            live -= _let_go(columns, columns.reads[index].storage, position, segment, room)
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            live -= _let_go(columns, columns.writes[index], position, segment, room)
    for op in ops:
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            storage = columns.writes[index]
            if marks[storage].live == stamp:  # only the outputs are left
                marks[storage].live = 0
                stays += storages[storage].rounded
    room.segments[segment].seconds = seconds
    room.segments[segment].spike = max(0, peak - stays)


@internal
def _let_go(columns: Columns, storage: int, position: int, segment: int, room: Segments) -> int:
    """Return the bytes that an intermediate frees after its last use; 0 for outputs."""
    mark = room.marks[storage]
    if mark.live != room.tally[0].stamp or mark.last_use != position:
        return 0
    for index in range(columns.storages[storage].gaps_start, columns.storages[storage + 1].gaps_start):
        if room.moves[columns.gap_lists[index]].segment == segment:
            return 0
    mark.live = 0
    return int(columns.storages[storage].rounded)
