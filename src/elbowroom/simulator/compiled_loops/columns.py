"""A trace and its costs as arrays of records, for compiled loops: the columnar form of `planned.PreparedTrace`.

Gaps are numbered in order of (closes, storage). Time is cut into slots, at every tick at which a decision can change
what is held; a slot's bytes are the most of its ticks. Lists of lists are one array of items and, in the records that
own them, where each list begins (`*_start`; the last record is there for the end of the last list alone).

    gaps      storage | opens | closes | ...      one row a gap
    events    tick | begin | opens | closes       one row a save or need, in order; the last row is the step's end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elbowroom.ir.gaps import Gap
from elbowroom.ir.trace import PERSISTENT_ROLES
from elbowroom.simulator.planned import PreparedTrace

Array = npt.NDArray[Any]

_EVENT = {
    "tick": "i8",
    "begin": "f8",  # plain seconds
    "at": "i8",  # slot of its tick
    "after": "i8",  # slot of the next tick
    "opens": "i8",  # gap that opens here; -1: none
    "closes": "i8",
    "next": "i8",  # the next event after which time passes; 0 where none does after this one, which then moves nothing
}
_GAP = {
    "storage": "i8",
    "opens": "i8",
    "closes": "i8",
    "open_event": "i8",
    "close_event": "i8",
    "payload": "i8",
    "rounded": "i8",
    "free": "i8",  # slot from which its absence frees anything
    "released": "i8",  # tick before which the program releases it
    "released_slot": "i8",
    "claim": "i8",
    "claim_end": "i8",  # slot
}
_STORAGE = {
    "rounded": "i8",
    "created": "i8",
    "released": "i8",
    "lasting": "i8",
    "gaps_start": "i8",
    "claims_start": "i8",
    "writers_start": "i8",
    "presences_start": "i8",
}
_CLAIM = {"begin": "i8", "end": "i8", "rounded": "i8"}
_PRESENCE = {"begin": "i8", "end": "i8"}
_OP = {
    "tick": "i8",
    "seconds": "f8",
    "workspace": "i8",
    "barrier": "i8",
    "reads_start": "i8",
    "writes_start": "i8",
}
_READ = {"storage": "i8", "version": "i8"}
_LINK = {
    "out_latency": "f8",
    "out_rate": "f8",
    "back_latency": "f8",
    "back_rate": "f8",
    "drag": "f8",
    "half_duplex": "i8",
    # Overflow of the tier below (`simulator.host_overflow`).
    "overflows": "i8",  # 0: unlimited
    "host_room": "i8",  # bytes
    "piece": "i8",  # bytes
    "disk_out_latency": "f8",
    "disk_out_rate": "f8",
    "disk_back_latency": "f8",
    "disk_back_rate": "f8",
}


class Columns(NamedTuple):
    """One trace on one machine. Arrays hold records, except for plain indices and byte counts."""

    events: Array
    gaps: Array
    slots: Array  # plain bytes
    storages: Array
    gap_lists: Array  # gaps of each storage, in order
    claims: Array
    writers: Array  # ops that write to each storage, in order
    presences: Array  # of each storage, in order; of most, none
    ops: Array
    reads: Array
    writes: Array  # storages
    link: Array  # one record
    step_seconds: float  # plain, with overhead


def make_records(fields: Mapping[str, str], count: int, **columns: Any) -> Array:
    """Return an array of records from columns; missing columns, and the tails of shorter ones, are 0."""
    records = np.zeros(count, dtype=np.dtype(list(fields.items()), align=True)).view(np.recarray)
    for name, values in columns.items():
        records[name][: len(values)] = values
    return records


def make_columns(replay: PreparedTrace, gaps: Mapping[tuple[int, int], Gap], plain_bytes: Sequence[int]) -> Columns:
    """Return the columns of a trace, its costs, and the gaps that are up for decision.

    Args:
        gaps: by (storage, index).
        plain_bytes: on the device during each tick if nothing leaves.

    Cost: linear in the trace.
    """
    trace = replay.trace
    ordered = sorted(gaps.values(), key=lambda gap: (gap.closes, gap.storage))
    ticks = sorted([save.tick for save in trace.saves] + [need.tick for need in trace.needs])
    claims = trace.claims
    frees = [_free_tick(replay, gap) for gap in ordered]
    let_go = [trace.storages[gap.storage].released for gap in ordered]
    slot_of, slots = _cut_slots(trace.end, ticks, [*frees, *let_go], plain_bytes)
    claims_start, claim_pairs = _flatten([claims.get(storage.id, ()) for storage in trace.storages])
    claim_storages = np.repeat(np.arange(len(trace.storages)), np.diff(claims_start))
    gap_records = _list_gaps(replay, ticks, ordered, slot_of, frees, claims, claims_start)
    claim_records = make_records(
        _CLAIM,
        len(claim_pairs),
        begin=[begin for begin, _ in claim_pairs],
        end=[end for _, end in claim_pairs],
        rounded=replay.rounded[claim_storages],
    )
    return Columns(
        events=_list_events(replay, ticks, ordered, slot_of),
        gaps=gap_records,
        slots=slots,
        **_list_storages(replay, ordered, claims_start),
        claims=claim_records,
        **_list_ops(replay),
        link=_list_link(replay),
        step_seconds=float(replay.begins[-1]) + replay.costs.overhead_seconds,
    )


def _list_events(replay: PreparedTrace, ticks: list[int], ordered: list[Gap], slot_of: Array) -> Array:
    index_of = {tick: index for index, tick in enumerate(ticks)}
    every = np.asarray([*ticks, replay.trace.end], dtype=np.int64)
    events = make_records(_EVENT, len(every), tick=every, begin=replay.begins[every], at=slot_of[every],
                          after=slot_of[every[:-1] + 1])  # fmt: skip
    events["opens"] = events["closes"] = -1
    acting = [*np.flatnonzero(np.diff(every) > 1).tolist(), len(ticks)]
    if acting[0] != len(ticks) - 1 and len(ticks):
        acting = sorted({*acting, len(ticks) - 1})
    events["next"][acting[:-1]] = acting[1:]
    for index, gap in enumerate(ordered):
        events["opens"][index_of[gap.opens]] = events["closes"][index_of[gap.closes]] = index
    return events


def _list_gaps(
    replay: PreparedTrace,
    ticks: list[int],
    ordered: list[Gap],
    slot_of: Array,
    frees: list[int],
    claims: Mapping[int, Sequence[tuple[int, int]]],
    claims_start: list[int],
) -> Array:
    homes = [replay.trace.storages[gap.storage] for gap in ordered]
    claim_of = [
        max(index for index, (begin, _) in enumerate(claims[gap.storage]) if begin <= gap.opens) for gap in ordered
    ]
    return make_records(
        _GAP,
        len(ordered),
        storage=[gap.storage for gap in ordered],
        opens=[gap.opens for gap in ordered],
        closes=[gap.closes for gap in ordered],
        open_event=np.searchsorted(ticks, [gap.opens for gap in ordered]),
        close_event=np.searchsorted(ticks, [gap.closes for gap in ordered]),
        payload=[home.nbytes for home in homes],
        rounded=[int(replay.rounded[home.id]) for home in homes],
        free=[slot_of[tick] for tick in frees],
        released=[home.released for home in homes],
        released_slot=[slot_of[home.released] for home in homes],
        claim=[claims_start[gap.storage] + index for gap, index in zip(ordered, claim_of, strict=True)],
        claim_end=[slot_of[claims[gap.storage][index][1]] for gap, index in zip(ordered, claim_of, strict=True)],
    )


def _list_storages(replay: PreparedTrace, ordered: list[Gap], claims_start: list[int]) -> dict[str, Array]:
    trace = replay.trace
    of_storage: list[list[int]] = [[] for _ in trace.storages]
    for index, gap in sorted(enumerate(ordered), key=lambda item: item[1].index):
        of_storage[gap.storage].append(index)
    writers = [list(dict.fromkeys(write.op for write in writes)) for writes in trace.writes]
    gaps_start, gap_lists = _flatten(of_storage)
    writers_start, flat_writers = _flatten(writers)
    presences_start, spans = _flatten([trace.present.get(storage.id, ()) for storage in trace.storages])
    storages = make_records(
        _STORAGE,
        len(trace.storages) + 1,
        rounded=replay.rounded,
        created=[storage.created for storage in trace.storages],
        released=[storage.released for storage in trace.storages],
        lasting=[storage.role in PERSISTENT_ROLES for storage in trace.storages],
        gaps_start=gaps_start,
        claims_start=claims_start,
        writers_start=writers_start,
        presences_start=presences_start,
    )
    return {
        "storages": storages,
        "gap_lists": np.asarray(gap_lists, dtype=np.int64),
        "writers": np.asarray(flat_writers, dtype=np.int64),
        "presences": make_records(
            _PRESENCE, len(spans), begin=[begin for begin, _ in spans], end=[end for _, end in spans]
        ),
    }


def _list_ops(replay: PreparedTrace) -> dict[str, Array]:
    trace, costs = replay.trace, replay.costs
    reads_start, reads = _flatten([op.reads for op in trace.ops])
    writes_start, writes = _flatten([op.writes for op in trace.ops])
    ops = make_records(
        _OP,
        len(trace.ops) + 1,
        tick=[op.tick for op in trace.ops],
        seconds=costs.op_seconds,
        workspace=costs.workspace_bytes,
        barrier=[bool(op.barrier) for op in trace.ops],
        reads_start=reads_start,
        writes_start=writes_start,
    )
    return {
        "ops": ops,
        "reads": make_records(_READ, len(reads), storage=[view.storage for view in reads],
                              version=[view.version for view in reads]),
        "writes": np.asarray([view.storage for view in writes], dtype=np.int64),
    }  # fmt: skip


def _list_link(replay: PreparedTrace) -> Array:
    link, overflow = replay.costs.link, replay.overflow
    further = {}
    if overflow is not None:
        further = {
            "overflows": [1],
            "host_room": [overflow.host_room_bytes],
            "piece": [overflow.piece_bytes],
            "disk_out_latency": [overflow.disk.out_latency_seconds],
            "disk_out_rate": [overflow.disk.out_bytes_per_second],
            "disk_back_latency": [overflow.disk.back_latency_seconds],
            "disk_back_rate": [overflow.disk.back_bytes_per_second],
        }
    return make_records(
        _LINK,
        1,
        **further,
        out_latency=[link.out_latency_seconds],
        out_rate=[link.out_bytes_per_second],
        back_latency=[link.back_latency_seconds],
        back_rate=[link.back_bytes_per_second],
        drag=[link.drag_seconds_per_byte],
        half_duplex=[link.half_duplex],
    )


def _free_tick(replay: PreparedTrace, gap: Gap) -> int:
    """Return the tick until which the program, or a running node, holds the storage anyway."""
    nodes = (released for tick, released in replay.node_spans[gap.storage] if tick <= gap.opens)
    return min(gap.closes, max(gap.opens + 1, replay.trace.storages[gap.storage].released, *nodes))


def _cut_slots(
    end: int, ticks: Sequence[int], others: Iterable[int], plain_bytes: Sequence[int]
) -> tuple[Array, Array]:
    """Return the slot of every tick, `end` included, and the bytes of every slot."""
    cuts = np.unique(np.asarray([0, *ticks, *(tick + 1 for tick in ticks), *others], dtype=np.int64))
    cuts = cuts[cuts < max(end, 1)]
    slot_of = np.searchsorted(cuts, np.arange(end + 1), side="right") - 1
    slot_of[end] = len(cuts)
    if not len(plain_bytes):
        return slot_of, np.zeros(1, dtype=np.int64)
    return slot_of, np.maximum.reduceat(np.asarray(plain_bytes, dtype=np.int64), cuts)


def _flatten(lists: Sequence[Sequence[Any]]) -> tuple[list[int], list[Any]]:
    start = [0]
    for each in lists:
        start.append(start[-1] + len(each))
    return start, [item for each in lists for item in each]
