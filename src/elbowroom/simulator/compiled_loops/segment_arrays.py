"""Arrays in which the segments of one vector of choices are found; reused from vector to vector."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from elbowroom.simulator.compiled_loops.columns import Array, Columns, make_records

_MOVE = {
    "choice": "i8",
    "segment": "i8",  # that ends a drop; -1
    "leave": "i8",  # tick from which it may be dropped
    "back": "i8",  # tick at which a replay makes it again
    "wanted": "i8",  # tick of the first replay that reads it, else its close
    # What follows is the sweep's.
    "state": "i8",
    "release_event": "i8",  # -1: never
    "back_event": "i8",
    "spilled": "i8",  # its copy is on the disk
    "ready": "f8",  # when its reload is over
    "latest": "f8",  # when its reload must begin, in stretched time
}
_SEGMENT = {
    "event": "i8",  # at which it runs
    "seconds": "f8",
    "spike": "i8",  # bytes beyond what it leaves behind
    "saved": "i8",  # tick from which all its leaves are claimed
    "ops_start": "i8",
    "leaves_start": "i8",
}
_STORAGE_MARK = {
    "made": "i8",  # stamps: the last search that made, read, held it
    "leaf": "i8",
    "live": "i8",
    "noted": "i8",
    "limit": "i8",  # writers before this tick are wanted
    "last_use": "i8",  # position among the ops of the segment
}
_FOUND = {
    "seconds": "f8",
    "spike": "i8",
    "saved": "i8",
    "conditions": "i8",  # how many of each are in `memo`, in this order; no ops: nothing is known
    "outputs": "i8",
    "held": "i8",
    "ops": "i8",
    "leaves": "i8",
}
_COUNT = {"segments": "i8", "ops": "i8", "leaves": "i8", "stamp": "i8"}

MEMO = 128
"""Numbers that are kept of a search; one that takes more is always made again."""


class Segments(NamedTuple):
    """Reusable buffers for the segments of one vector of choices."""

    moves: Array  # per gap
    segments: Array  # the last record in use is there for the end of the last lists
    ops: Array  # op indices, in order
    leaves: Array  # storages, sorted
    marks: Array  # per storage
    op_marks: Array  # per op: the last search that took it
    stack: Array  # pairs of storage and limit
    found: Array  # per gap: the last search for it
    memo: Array  # per gap: its lists
    tally: Array  # one record


def make_segments(columns: Columns) -> Segments:
    """Allocate the buffers for the segments of one trace."""
    gaps, views = len(columns.gaps), len(columns.reads) + len(columns.writes)
    return Segments(
        moves=make_records(_MOVE, gaps),
        segments=make_records(_SEGMENT, gaps + 1),
        ops=np.zeros(4 * len(columns.ops) + 16, dtype=np.int64),
        leaves=np.zeros(4 * views + 16, dtype=np.int64),
        marks=make_records(_STORAGE_MARK, len(columns.storages)),
        op_marks=np.zeros(len(columns.ops), dtype=np.int64),
        stack=np.zeros(2 * (views + 8), dtype=np.int64),
        found=make_records(_FOUND, gaps),
        memo=np.zeros((gaps, MEMO), dtype=np.int32),
        tally=make_records(_COUNT, 1),
    )
