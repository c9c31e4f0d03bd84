"""Replay counts that bound the cost of drops from below, with as few variables as possible.

    dropped a ----> op 3 ----> op 2        once per drop of a: part of the cost of dropping a
    dropped b ----> op 7 --.
    dropped c ----> op 8 ---+-> op 6       at least as often as op 7, and as op 8: its own count

An op that only one drop requires, directly or through other ops, needs no count.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from elbowroom.planner.bounds.gap_arrays import GapArrays, Integers, Numbers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayCounts:
    """Counts, and demands on them: each count is at least the sum of the terms of each of its demands.

    Attributes:
        drop_seconds: by gap, the time of the ops that only this drop requires.
        count_seconds: by count, the time of one replay.
        demanded: by demand, its count.
        drop_demand, drop_gap: pairs: this demand adds the drop of this gap.
        count_demand, count_asking: pairs: this demand adds that other count.
    """

    drop_seconds: Numbers
    count_seconds: Numbers
    demanded: Integers
    drop_demand: Integers
    drop_gap: Integers
    count_demand: Integers
    count_asking: Integers


def count_replays(gap_arrays: GapArrays, drops: Integers, op_seconds: Numbers) -> ReplayCounts:
    """Find the counts that are needed if these gaps may be dropped.

    Cost: linear in the ops that may be replayed.
    """
    takes = gap_arrays.forced.takes
    results: dict[int, dict[int, list[int]]] = {}  # op: storage: its gaps
    for gap in drops.tolist():
        results.setdefault(int(gap_arrays.maker[gap]), {}).setdefault(gap_arrays.keys[gap][0], []).append(gap)
    askers: dict[int, list[int]] = {}
    for op in sorted(_close(results, takes), reverse=True):  # an op that requires another comes after it
        askers.setdefault(op, [])
        for taken in takes[op]:
            askers.setdefault(taken, []).append(op)
    drop_seconds = np.zeros(len(gap_arrays.keys))
    count_seconds: list[float] = []
    stands_for: dict[int, tuple[bool, int]] = {}  # by op: whether it is a drop or a count, and its index
    demands: list[int] = []
    of_drops: list[tuple[int, int]] = []
    of_counts: list[tuple[int, int]] = []
    for op in sorted(askers, reverse=True):
        asking = [[(True, gap) for gap in gaps] for gaps in results.get(op, {}).values()]
        asking += [[stands_for[other]] for other in askers[op]]
        if len(asking) == len(asking[0]) == 1:
            stands_for[op] = asking[0][0]
        else:
            stands_for[op] = False, len(count_seconds)
            for each in asking:
                of_drops += [(len(demands), gap) for is_drop, gap in each if is_drop]
                of_counts += [(len(demands), count) for is_drop, count in each if not is_drop]
                demands.append(len(count_seconds))
            count_seconds.append(0.0)
        is_drop, index = stands_for[op]
        if is_drop:
            drop_seconds[index] += op_seconds[op]
        else:
            count_seconds[index] += op_seconds[op]
    drop_demand, drop_gap = np.array(of_drops, dtype=np.int64).reshape(-1, 2).T
    count_demand, count_asking = np.array(of_counts, dtype=np.int64).reshape(-1, 2).T
    return ReplayCounts(
        drop_seconds=drop_seconds, count_seconds=np.array(count_seconds), demanded=np.array(demands, dtype=np.int64),
        drop_demand=drop_demand, drop_gap=drop_gap, count_demand=count_demand, count_asking=count_asking,
    )  # fmt: skip


def _close(results: dict[int, dict[int, list[int]]], takes: tuple[tuple[int, ...], ...]) -> set[int]:
    """Return these ops and all that their replays take."""
    found: set[int] = set()
    pending = list(results)
    while pending:
        op = pending.pop()
        if op not in found:
            found.add(op)
            pending += takes[op]
    return found
