"""Splits a step into a chain of stages: at each cut, the forward pass hands on one storage that may be dropped.

    forward    stage 0 | stage 1 | stage 2        after a cut, everything is computed from its boundary, and the
    boundary          b1        b2                backward pass needs later stages before earlier ones
    backward   stage 0 | stage 1 | stage 2   (from right to left)

Everything that a stage saves besides its boundary is inner to it. A storage that is read across half of the forward
pass (a mask that every layer reads), or that cannot be computed from the boundary, stays on the device.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import PERSISTENT_ROLES, Trace
from elbowroom.planner.problem import Problem
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.replays.closure import Closure
from elbowroom.simulator.compiled_loops.columns import Array

WIDE = 0.5
"""Share of the forward pass: storages that are read across more of it are kept."""

FEWEST_STAGES, MOST_STAGES = 3, 100

MOST_INNER = 64
"""A stage that saves more storages is not treated as a stage of a chain: measuring it would take too long."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Cost of one replay.

    Attributes:
        seconds: infinite if it is impossible.
        peak_bytes: everything that it produces, including its results.
    """

    seconds: float
    peak_bytes: int


NOTHING = Replayed(seconds=0.0, peak_bytes=0)
IMPOSSIBLE = Replayed(seconds=float("inf"), peak_bytes=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage and its costs. Bytes "of others" exclude every storage that a plan may drop and that is not in use.

    Attributes:
        boundary: the storage that it begins from; None if that stays on the device in any case.
        inner: the other storages that it saves and that can be computed from the boundary.
        want: tick of the first need of its backward pass.
        boundary_bytes, inner_bytes: their sizes, rounded as the allocator does.
        passing: replay that computes the next boundary from its own, and nothing else.
        serving: replay that computes the inner storages.
        holding: replay that computes both.
        sparing: replays that compute each inner storage at its own need, and keep nothing for the next.
        forward_bytes: peak of others in its forward pass.
        forward_own_bytes: peak of others and its boundary.
        forward_all_bytes: peak of others, its boundary and its inner storages.
        want_bytes: bytes of others at `want`, without the storages needed there.
        backward_bytes: peak of others, its boundary and its inner storages in its backward pass.
        sparing_bytes: peak of others, its boundary and the `sparing` replays.
    """

    boundary: Key | None
    inner: tuple[Key, ...]
    want: int
    boundary_bytes: int
    inner_bytes: int
    passing: Replayed
    serving: Replayed
    holding: Replayed
    sparing: Replayed
    forward_bytes: int
    forward_own_bytes: int
    forward_all_bytes: int
    want_bytes: int
    backward_bytes: int
    sparing_bytes: int


def find_stages(problem: Problem) -> list[Stage]:
    """Return the stages of a step, in the order of the forward pass; an empty list if it is not a chain.

    Cost: linear in the trace, and in the ops of each stage for each storage that it saves.
    """
    trace = problem.drafter.replay.trace
    if not trace.needs:
        return []
    keys = _find_candidates(problem.drafter)
    cuts = _thin(_find_cuts(trace, keys))
    begins = [tick for tick, _ in cuts]
    saved = np.searchsorted(begins, [trace.storages[storage].created for storage in keys], side="right")
    if len(cuts) < FEWEST_STAGES or np.bincount(saved).max(initial=0) > MOST_INNER:
        return []
    return _Measurer(problem, keys, cuts).list_stages()


def _find_candidates(drafter: Drafter) -> dict[int, Key]:
    """Return, by storage, its gap from forward to backward pass, if it is not read across half of the forward pass."""
    trace = drafter.replay.trace
    forward_end = trace.needs[0].tick
    last_read = _find_last_reads(trace)
    return {
        storage: (storage, index)
        for (storage, index), gap in drafter.gaps.items()
        if gap.opens < forward_end <= gap.closes
        and last_read.get(storage, 0) - trace.storages[storage].created <= WIDE * forward_end
        and drafter.find_closure(storage, gap.closes, lambda _: False) is not None
    }


def _find_last_reads(trace: Trace) -> dict[int, int]:
    """Return, by storage, the last op of the forward pass that reads it."""
    forward_end = trace.needs[0].tick
    return {view.storage: op.tick for op in trace.ops if op.tick < forward_end for view in op.reads}


def _find_cuts(trace: Trace, keys: dict[int, Key]) -> list[tuple[int, int]]:
    """Return the ticks at which stages begin, and their boundary storages; -1 if there is none."""
    cuts = [(0, -1)]
    orders = _find_orders(trace)
    last_cut = -1
    for crossing, ticks in itertools.groupby(_list_crossings(trace), key=lambda item: item[1]):
        droppable = [storage for storage in crossing if storage in keys]
        valid = [tick for tick, _ in ticks if orders[tick]]
        if len(droppable) > 1 or not valid or valid[-1] == 0:
            continue
        tick = valid[-1]
        if orders[tick] != last_cut:  # there is a need between this cut and the previous one
            last_cut = orders[tick]
            cuts.append((tick, droppable[0] if droppable else -1))
    return cuts


def _list_crossings(trace: Trace) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield, by tick, the storages that the forward pass hands on across it, if autograd saves all of them."""
    forward_end = trace.needs[0].tick
    last_read = _find_last_reads(trace)
    made: dict[int, list[int]] = {}
    read: dict[int, list[int]] = {}
    for storage, tick in last_read.items():
        if trace.storages[storage].role not in PERSISTENT_ROLES:
            made.setdefault(trace.storages[storage].created, []).append(storage)
            read.setdefault(tick, []).append(storage)
    saved = {save.storage for save in trace.saves if save.tick < forward_end}
    crossing: frozenset[int] = frozenset(made.get(-1, ()))
    for tick in range(forward_end):
        if crossing <= saved:
            yield tick, crossing
        if tick in made or tick in read:
            crossing = crossing.union(made.get(tick, ())).difference(read.get(tick, ()))


def _find_orders(trace: Trace) -> list[int]:
    """Return, by forward tick, the first need of earlier saves, if all later saves are needed before it; else 0."""
    forward_end = trace.needs[0].tick
    first, last = [trace.end] * (forward_end + 1), [-1] * (forward_end + 1)
    for need in trace.needs:
        tick = trace.saves[need.save].tick
        if tick < forward_end:
            first[tick], last[tick] = min(first[tick], need.tick), max(last[tick], need.tick)
    earliest = [trace.end, *itertools.accumulate(first, min)]  # of storages saved before each tick
    latest = [*itertools.accumulate(reversed(last), max)][::-1]  # of storages saved at it or later
    return [earliest[tick] if 0 <= latest[tick] < earliest[tick] < trace.end else 0 for tick in range(forward_end)]


def _thin(cuts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return at most `MOST_STAGES` of the cuts, spread evenly."""
    step = -(-len(cuts) // MOST_STAGES)
    return cuts[::step]


class _Measurer:
    """Measures the bytes and replays of the stages between cuts."""

    def __init__(self, problem: Problem, keys: dict[int, Key], cuts: Sequence[tuple[int, int]]) -> None:
        self._drafter, self._trace = problem.drafter, problem.drafter.replay.trace
        self._rounded = problem.drafter.replay.rounded
        self._forward_end = self._trace.needs[0].tick
        self._begins = [tick for tick, _ in cuts]
        self._bounds = [storage for _, storage in cuts]
        self._ends = [*self._begins[1:], self._forward_end]
        self._dropped: set[int] = {storage for storage in self._bounds if storage >= 0}
        self._keys = keys
        self._inner = [self._find_inner(stage) for stage in range(len(cuts))]
        self._wants = self._find_wants()
        self._others = np.array(problem.plain.live_bytes, dtype=np.int64)
        for storage in self._dropped:
            begin, end = self._find_absence(storage)
            self._others[begin:end] -= self._rounded[storage]

    def list_stages(self) -> list[Stage]:
        return [self._measure(stage) for stage in range(len(self._begins))]

    def _find_inner(self, stage: int) -> list[int]:
        """Return, and mark as dropped, a stage's storages that can be computed from its boundary and kept storages."""
        begin, end = self._begins[stage], self._ends[stage]
        found = []
        for storage, key in sorted(self._keys.items(), key=lambda item: (self._drafter.gaps[item[1]].opens, item[0])):
            inside = begin <= self._trace.storages[storage].created < end
            if not inside or storage in self._dropped:
                continue
            if self._close(storage, self._drafter.gaps[key].closes, stage) is not None:
                self._dropped.add(storage)
                found.append(storage)
        return found

    def _close(self, storage: int, tick: int, stage: int) -> Closure | None:
        """Return the closure of a storage, given the boundary of a stage."""
        bound = self._bounds[stage]
        return self._drafter.find_closure(
            storage, tick, lambda other: other == storage or (other in self._dropped and other != bound)
        )

    def _find_wants(self) -> list[int]:
        """Return the first need of each stage's backward pass."""
        wants = [self._trace.end] * len(self._begins)
        for need in self._trace.needs:
            tick = self._trace.saves[need.save].tick
            if tick < self._forward_end:
                stage = int(np.searchsorted(self._begins, tick, side="right")) - 1
                wants[stage] = min(wants[stage], need.tick)
        return wants

    def _find_absence(self, storage: int) -> tuple[int, int]:
        """Return the ticks during which dropping a storage frees its bytes."""
        gap = self._drafter.gaps[self._keys[storage]]
        return max(gap.opens + 1, self._trace.storages[storage].released), gap.closes

    def _measure(self, stage: int) -> Stage:
        begin = self._begins[stage]
        end = self._ends[stage]
        want = self._wants[stage]
        bound, inner = self._bounds[stage], self._inner[stage]
        following = self._bounds[stage + 1] if stage + 1 < len(self._bounds) else -1
        own = [] if bound < 0 else [bound]
        onward = [] if following < 0 else [following]
        wanted = [storage for storage in (*own, *inner) if self._drafter.gaps[self._keys[storage]].closes == want]
        alone = [self._replay([storage], stage) for storage in inner]
        backward_end = self._wants[stage - 1] if stage else self._trace.end
        return Stage(
            boundary=None if bound < 0 else self._keys[bound],
            inner=tuple(self._keys[storage] for storage in inner),
            want=want,
            boundary_bytes=self._count(own),
            inner_bytes=self._count(inner),
            passing=self._replay(onward, stage),
            serving=self._replay(inner, stage),
            holding=self._replay([*inner, *onward], stage),
            sparing=Replayed(
                seconds=sum(each.seconds for each in alone),
                peak_bytes=max((each.peak_bytes for each in alone), default=0),
            ),
            forward_bytes=self._find_peak(begin, end, []),
            forward_own_bytes=self._find_peak(begin, end, own),
            forward_all_bytes=self._find_peak(begin, end, [*own, *inner]),
            want_bytes=self._find_peak(want, want + 1, []) - self._count(wanted),
            backward_bytes=self._find_peak(want, backward_end, [*own, *inner]),
            sparing_bytes=self._find_spared_peak(want, backward_end, own, dict(zip(inner, alone, strict=True))),
        )

    def _count(self, storages: Sequence[int]) -> int:
        return int(self._rounded[list(storages)].sum())

    def _find_peak(self, begin: int, end: int, storages: Sequence[int]) -> int:
        """Return the peak bytes of others and of these storages."""
        held: Array = self._others[begin:end].copy()
        for storage in storages:
            absent, back = self._find_absence(storage)
            held[max(absent - begin, 0) : max(back - begin, 0)] += self._rounded[storage]
        return int(held.max(initial=0))

    def _find_spared_peak(self, begin: int, end: int, own: Sequence[int], alone: dict[int, Replayed]) -> int:
        """Return the peak bytes of others, the boundary, and replays of one storage each."""
        peak = self._find_peak(begin, end, own)
        for storage, replayed in alone.items():
            tick = self._drafter.gaps[self._keys[storage]].closes
            beside = self._find_peak(tick, tick + 1, own) - self._count([storage])
            peak = max(peak, beside + replayed.peak_bytes)
        return peak

    def _replay(self, storages: Sequence[int], stage: int) -> Replayed:
        """Return the cost of computing these storages from the boundary of a stage."""
        if not storages:
            return NOTHING
        ops: set[int] = set()
        leaves: set[int] = set()
        for storage in storages:
            closure = self._close(storage, self._drafter.gaps[self._keys[storage]].closes, stage)
            if closure is None:
                return IMPOSSIBLE
            ops |= set(closure.ops)
            leaves |= set(closure.leaves)
        outputs = tuple(sorted(storages))
        segment = Segment(ops=tuple(sorted(ops)), outputs=outputs, leaves=tuple(sorted(leaves)))
        footprint = self._drafter.replay.footprints.measure(segment, outputs)
        return Replayed(seconds=footprint.seconds, peak_bytes=footprint.extra_bytes + footprint.output_bytes)
