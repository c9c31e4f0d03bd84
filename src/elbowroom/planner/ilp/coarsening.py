"""Coarsens a step to few intervals of time and few bundles of gaps, so that an integer program can hold it.

    moments   |  |   | |   |    |  | |  |   |       saves and needs
    stretches |------|-----|-------|----|---|       each has a similar time, and similar bytes saved or needed

Coarse in time: a stretch lies between two moments and stands for its maximum; a storage counts in it unless it is away
for all of it. Coarse in space: storages that may be away in the same stretches move together, up to a share of all
bytes. So whatever fits here fits in the real step.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.memory_curve import MemoryCurve
from elbowroom.planner.schedule.timing import list_moments

MOST_IN_A_BUNDLE = 1 / 64
"""Most bytes of a bundle, as a share of all bytes that may be away."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """An interval of the step, from the tick after `begin` to `end`. Both are moments; the last one ends with the step.

    Attributes:
        seconds: its time in the plain step.
        live_bytes: its peak, if nothing is away.
    """

    begin: int
    end: int
    seconds: float
    live_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Gaps whose storages move together.

    Attributes:
        keys: the gaps, by their needs.
        copied: the first stretch in which the copy can begin.
        first, last: the stretches in which all of them may be away.
        nbytes: their total.
        out_seconds, back_seconds: the total time of their copies.
        early_seconds: time in stretch `copied` before the copy can begin.
        late_seconds: time in the stretch after `last` from the first need on.
        before: the previous gap of the same storage and claim; its copy, if there is one, serves this gap as well.
    """

    keys: tuple[Key, ...]
    copied: int
    first: int
    last: int
    nbytes: int
    out_seconds: float
    back_seconds: float
    early_seconds: float
    late_seconds: float
    before: Key | None


def cut_stretches(drafter: Drafter, load: MemoryCurve, count: int) -> tuple[Stretch, ...]:
    """Cut the step into at most `count` stretches, from the first moment to the end."""
    trace, begins = drafter.replay.trace, drafter.begins
    moments = list_moments(trace)
    if not moments:
        return ()
    moved = dict.fromkeys(moments, 0)
    for key, gap in drafter.gaps.items():
        moved[gap.opens] += load.nbytes[key]
        moved[gap.closes] += load.nbytes[key]
    all_bytes, all_seconds = max(1, sum(moved.values())), max(begins[-1] - begins[moments[0]], 1e-12)
    bounds, passed = [moments[0]], 0.0
    for tick in moments[1:]:
        progress = passed / all_bytes + (begins[tick] - begins[moments[0]]) / all_seconds  # up to 2
        if len(bounds) < count and progress * count >= 2 * len(bounds):
            bounds.append(tick)
        passed += moved[tick]
    bounds.append(trace.end - 1)
    return tuple(
        Stretch(begin=begin, end=end, seconds=begins[end + 1 if end == bounds[-1] else end] - begins[begin],
                live_bytes=int(load.live[begin + 1 : end + 1].max()))
        for begin, end in itertools.pairwise(bounds)
        if begin < end
    )  # fmt: skip


def make_bundles(drafter: Drafter, load: MemoryCurve, stretches: tuple[Stretch, ...]) -> tuple[Bundle, ...]:
    """Bundle the gaps that span at least one stretch, by the stretches that they span."""
    begins = [stretch.begin for stretch in stretches]
    spans: dict[tuple[int, int, int, Key | None], list[Key]] = {}
    free: dict[tuple[int, int], Key] = {}  # by claim, its latest gap so far
    for key, gap in sorted(drafter.gaps.items()):
        copied = bisect.bisect(begins, gap.opens) - 1
        first = max(copied + 1, bisect.bisect_left(begins, load.gone[key] - 1))
        last = bisect.bisect_left(begins, gap.closes) - 2  # the stretch before the one in which it closes
        claim = (key[0], drafter.graph.claim_at(key[0], gap.closes))
        before = free.get(claim)
        free[claim] = key
        if first <= last:
            spans.setdefault((copied, first, last, before), []).append(key)
    most = MOST_IN_A_BUNDLE * sum(load.nbytes[key] for keys in spans.values() for key in keys)
    bundles = []
    for (copied, first, last, before), keys in sorted(spans.items(), key=lambda item: item[0][:3]):
        keys.sort(key=lambda key: drafter.gaps[key].closes)
        while keys:
            count, nbytes = 1, load.nbytes[keys[0]]
            while count < len(keys) and nbytes + load.nbytes[keys[count]] <= most:
                nbytes += load.nbytes[keys[count]]
                count += 1
            bundles.append(_make_bundle(drafter, stretches, keys[:count], (copied, first, last), nbytes, before))
            del keys[:count]
    return tuple(bundles)


def _make_bundle(
    drafter: Drafter,
    stretches: tuple[Stretch, ...],
    keys: list[Key],
    span: tuple[int, int, int],
    nbytes: int,
    before: Key | None,
) -> Bundle:
    link = drafter.replay.costs.link
    storages = drafter.replay.trace.storages
    begins = drafter.begins
    sizes = [storages[storage].nbytes for storage, _ in keys]
    copied, first, last = span
    opening, closing = stretches[copied], stretches[last + 1]
    early = begins[max(drafter.gaps[key].opens for key in keys)] - begins[opening.begin]
    late = begins[closing.begin] + closing.seconds - begins[min(drafter.gaps[key].closes for key in keys)]
    return Bundle(
        keys=tuple(keys),
        copied=copied,
        first=first,
        last=last,
        nbytes=nbytes,
        out_seconds=sum(offload_seconds(link, size) for size in sizes),
        back_seconds=sum(reload_seconds(link, size) for size in sizes),
        early_seconds=early,
        late_seconds=late,
        before=before,
    )
