"""Finds the ops to replay for given choices, their times and costs: the compiled form of `replays.closure`.

Dropped gaps are visited in order of their closes. If a replay makes other dropped storages that are still needed, these
stay, unless their choice is to be recomputed at their own close; so one replay can close several gaps.

Most replays are the same for successive vectors of choices. The last search for each gap is cached with its conditions:
the choices for the storages that it met, and whether these were still needed. A search is repeated only if one of these
conditions has changed, so that nothing has to be invalidated.
"""

from __future__ import annotations

from elbowroom._numba_loops import compiled, inlined, internal
from elbowroom.simulator.compiled_loops.columns import Array, Columns
from elbowroom.simulator.compiled_loops.passage import walk
from elbowroom.simulator.compiled_loops.segment_arrays import Segments

KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_OWN, RECOMPUTE_KEEP_INPUTS = range(5)
"""Choices for a gap. The last three drop the storage: RECOMPUTE until the first replay that makes it, RECOMPUTE_OWN
until the gap's own close, whatever is replayed before, RECOMPUTE_KEEP_INPUTS likewise, but only after the last replay
that reads it."""

CHOICES = 5


@compiled
def find_segments(columns: Columns, room: Segments) -> int:
    """Fill `room` for the recomputed gaps among `room.moves`.

    Returns:
        -1, or the first gap that cannot be recomputed under these choices.

    Cost: linear in the ops replayed.
    """
    moves = room.moves
    gaps = columns.gaps
    count = room.tally[0]
    count.segments = count.ops = count.leaves = 0
    for gap in range(len(moves)):
        moves[gap].segment = -1
        moves[gap].wanted = gaps[gap].closes
        moves[gap].leave = gaps[gap].opens
    for gap in range(len(moves)):
        if moves[gap].choice >= RECOMPUTE and moves[gap].segment < 0 and not add_segment(columns, gap, room):
            return gap
    for gap in range(len(moves)):
        if moves[gap].segment >= 0:
            segment = moves[gap].segment
            # A dropped storage lives on in the leaves of its replay, so they must have been saved before it goes.
            leave = max(moves[gap].leave, room.segments[segment].saved)
            if leave >= gaps[gap].closes or leave >= moves[gap].back:
                return gap
            moves[gap].leave = leave
    return -1


@internal
def add_segment(columns: Columns, target: int, room: Segments) -> bool:
    """Add the segment that is replayed when a dropped gap closes. Return False if there is none."""
    count, segments = room.tally[0], room.segments
    segment, tick = count.segments, columns.gaps[target].closes
    segments[segment].event = columns.gaps[target].close_event
    segments[segment].ops_start, segments[segment].leaves_start = count.ops, count.leaves
    known = _recall(room.found, room.memo, room.moves, segments, room.ops, room.leaves, room.tally, target, tick)
    if not known and not _make(columns, target, room):
        return False
    segments[segment + 1].ops_start, segments[segment + 1].leaves_start = count.ops, count.leaves
    count.segments += 1
    return True


@internal
def _recall(
    finds: Array, memos: Array, moves: Array, segments: Array, ops: Array, leaves: Array, tally: Array, target: int,
    tick: int,
) -> bool:  # fmt: skip
    """Reuse the result of the last search, if its conditions still hold."""
    found = finds[target]
    memo = memos[target]
    count = tally[0]
    if found.ops == 0 or count.ops + found.ops > len(ops) or count.leaves + found.leaves > len(leaves):
        return False
    for index in range(found.conditions):
        gap = memo[index] >> 4
        if memo[index] & 15 != 2 * moves[gap].choice + (moves[gap].segment < 0):
            return False
    place = found.conditions
    for index in range(place, place + found.outputs):
        moves[memo[index]].segment = count.segments
        moves[memo[index]].back = tick
    place += found.outputs
    for index in range(place, place + found.held):
        _hold(moves, memo[index], tick)
    place += found.held
    for index in range(found.ops):
        ops[count.ops + index] = memo[place + index]
    place += found.ops
    for index in range(found.leaves):
        leaves[count.leaves + index] = memo[place + index]
    count.ops += found.ops
    count.leaves += found.leaves
    segment = segments[count.segments]
    segment.seconds = found.seconds
    segment.spike = found.spike
    segment.saved = found.saved
    return True


@inlined
def _hold(moves: Array, gap: int, tick: int) -> None:
    """Record that a replay at `tick` reads a storage in one of its gaps."""
    moves[gap].wanted = min(moves[gap].wanted, tick)
    if moves[gap].choice == RECOMPUTE_KEEP_INPUTS:
        moves[gap].leave = max(moves[gap].leave, tick)


@internal
def _make(columns: Columns, target: int, room: Segments) -> bool:
    """Search for the segment of a gap, and cache the result."""
    count, storages, gaps, moves, marks = room.tally[0], columns.storages, columns.gaps, room.moves, room.marks
    found, memo, segment, tick = room.found[target], room.memo[target], count.segments, gaps[target].closes
    found.ops = 0
    count.stamp += 1
    stamp = count.stamp
    ops_begin, leaves_begin = count.ops, count.leaves
    if not _search(columns, gaps[target].storage, tick, room):
        return False
    ops, leaves = room.ops[ops_begin : count.ops], room.leaves[leaves_begin : count.leaves]
    _sort(ops)
    _sort(leaves)
    size = _note_conditions(columns, ops, tick, room, memo)
    found.conditions = size
    for op in ops:
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            storage = columns.writes[index]
            if marks[storage].leaf == stamp:
                return False  # a storage that is made here cannot be a leaf, too
    for op in ops:
        for index in range(columns.ops[op].writes_start, columns.ops[op + 1].writes_start):
            storage = columns.writes[index]
            last = columns.writers[storages[storage + 1].writers_start - 1]
            if marks[storage].made != stamp or columns.ops[last].tick >= marks[storage].limit:
                continue
            gap = _dropped_gap(storages, columns.gap_lists, gaps, moves, storage, tick)
            if gap >= 0 and (moves[gap].choice == RECOMPUTE or gaps[gap].closes == tick):
                moves[gap].segment = segment
                moves[gap].back = tick
                size = _note(memo, size, gap)
    found.outputs = size - found.conditions
    saved = -1
    for leaf in leaves:
        saved = max(saved, _claim_at(storages, columns.claims, leaf, tick))
        for index in range(storages[leaf].gaps_start, storages[leaf + 1].gaps_start):
            gap = columns.gap_lists[index]
            if gaps[gap].opens < tick < gaps[gap].closes:
                _hold(moves, gap, tick)
                size = _note(memo, size, gap)
    found.held = size - found.conditions - found.outputs
    room.segments[segment].saved = saved
    walk(columns, ops, segment, room)
    for op in ops:
        size = _note(memo, size, op)
    for leaf in leaves:
        size = _note(memo, size, leaf)
    if size <= len(memo):
        found.seconds, found.spike = room.segments[segment].seconds, room.segments[segment].spike
        found.saved, found.ops, found.leaves = saved, len(ops), len(leaves)
    return True


@inlined
def _note(memo: Array, size: int, value: int) -> int:
    """Append a number if there is room; count it in any case."""
    if size < len(memo):
        memo[size] = value
    return size + 1


@internal
def _note_conditions(columns: Columns, ops: Array, tick: int, room: Segments, memo: Array) -> int:
    """Record the conditions of the search: the variable state of the storages that it met. Return their number."""
    storages = columns.storages
    gaps = columns.gaps
    moves = room.moves
    marks = room.marks
    size = 0
    stamp = room.tally[0].stamp
    for op in ops:
        reads, writes = columns.ops[op].reads_start, columns.ops[op].writes_start
        for index in range(columns.ops[op + 1].reads_start - reads + columns.ops[op + 1].writes_start - writes):
            is_read = index < columns.ops[op + 1].reads_start - reads
            if is_read:
                storage = columns.reads[reads + index].storage
            else:
                storage = columns.writes[writes + index - (columns.ops[op + 1].reads_start - reads)]
            if marks[storage].noted == stamp:
                continue
            marks[storage].noted = stamp
            for place in range(storages[storage].gaps_start, storages[storage + 1].gaps_start):
                gap = columns.gap_lists[place]
                if gaps[gap].opens < tick <= gaps[gap].closes:
                    size = _note(memo, size, (gap << 4) + 2 * moves[gap].choice + (moves[gap].segment < 0))
    return size


@internal
def _sort(values: Array) -> None:
    """Sort in place by Shell's method: most lists are short, and NumPy's sort takes seconds longer to compile."""
    gap = 1
    while gap < len(values) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for index in range(gap, len(values)):
            value, position = values[index], index
            while position >= gap and values[position - gap] > value:
                values[position] = values[position - gap]
                position -= gap
            values[position] = value
        gap //= 3


@internal
def _search(columns: Columns, target: int, tick: int, room: Segments) -> bool:
    """Collect the ops that recompute `target` at `tick`, and the leaves that they read."""
    count = room.tally[0]
    storages = columns.storages
    marks = room.marks
    stack = room.stack
    stamp = count.stamp
    stack[0], stack[1] = target, tick
    height = 1
    while height > 0:
        height -= 1
        storage, limit = stack[2 * height], stack[2 * height + 1]
        if marks[storage].made == stamp and marks[storage].limit >= limit:
            continue
        marks[storage].made, marks[storage].limit = stamp, limit
        if storages[storage].created < 0:
            return False
        for position in range(storages[storage].writers_start, storages[storage + 1].writers_start):
            op = columns.writers[position]
            if columns.ops[op].tick >= limit:
                break
            if room.op_marks[op] == stamp:
                continue
            if columns.ops[op].barrier or count.ops >= len(room.ops):
                return False
            room.op_marks[op] = stamp
            room.ops[count.ops] = op
            count.ops += 1
            for index in range(columns.ops[op].reads_start, columns.ops[op + 1].reads_start):
                read = columns.reads[index].storage
                if marks[read].leaf == stamp:
                    if _is_there(columns, room.moves, read, columns.reads[index].version, tick):
                        continue
                elif _is_there(columns, room.moves, read, columns.reads[index].version, tick):
                    if count.leaves >= len(room.leaves):
                        return False
                    marks[read].leaf = stamp
                    room.leaves[count.leaves] = read
                    count.leaves += 1
                    continue
                stack[2 * height], stack[2 * height + 1] = read, columns.ops[op].tick
                height += 1
    return True


@internal
def _is_there(columns: Columns, moves: Array, storage: int, version: int, tick: int) -> bool:
    storages = columns.storages
    begin, end = storages[storage].presences_start, storages[storage + 1].presences_start
    is_present = begin == end
    for index in range(begin, end):
        is_present = is_present or columns.presences[index].begin <= tick < columns.presences[index].end
    if not is_present:
        return False
    if storages[storage].lasting:
        if not storages[storage].created < tick < storages[storage].released:
            return False
    else:
        claimed = _claim_at(storages, columns.claims, storage, tick) >= 0
        if not claimed or _dropped_gap(storages, columns.gap_lists, columns.gaps, moves, storage, tick) >= 0:
            return False
    writes = 0  # before the replay: its contents must be those that were read
    for position in range(storages[storage].writers_start, storages[storage + 1].writers_start):
        if columns.ops[columns.writers[position]].tick >= tick:
            break
        writes += 1
    return bool(writes - (1 if storages[storage].created >= 0 else 0) == version)


@inlined
def _claim_at(storages: Array, claims: Array, storage: int, tick: int) -> int:
    found = -1
    for index in range(storages[storage].claims_start, storages[storage + 1].claims_start):
        if claims[index].begin < tick < claims[index].end and found < 0:
            found = claims[index].begin
    return found


@inlined
def _dropped_gap(storages: Array, gap_lists: Array, gaps: Array, moves: Array, storage: int, tick: int) -> int:
    """Return the gap in which a storage is dropped at `tick` and not yet restored; -1 if there is none."""
    found = -1
    for index in range(storages[storage].gaps_start, storages[storage + 1].gaps_start):
        gap = gap_lists[index]
        if gaps[gap].opens < tick <= gaps[gap].closes and moves[gap].choice >= RECOMPUTE and moves[gap].segment < 0:
            if moves[gap].choice != RECOMPUTE_KEEP_INPUTS or tick == gaps[gap].closes:
                found = gap
            break
    return found
