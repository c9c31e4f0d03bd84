"""A Draft: choices for gaps, before they have ticks; and how it becomes a Plan.

choices  ->  segments (what is replayed together)  ->  ticks of moves (just in time)  ->  Plan
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.replays.closure import Closure, find_closure
from elbowroom.replays.graph import TraceGraph
from elbowroom.simulator.planned import PreparedTrace

Key = tuple[int, int]
"""(storage, index of the gap)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """The choice for a gap.

    Attributes:
        release_now: give the device's copy up as soon as it may leave, and wait for the transfer.
        on_demand: reload on demand instead of in time.
        release, back: offload: the ticks of these moves, where a strategy sets them itself (`ir.plan.Decision`).
    """

    choice: Choice
    release_now: bool = False
    on_demand: bool = False
    release: int | None = None
    back: int | None = None


Draft = dict[Key, Option]


class Drafter:
    """Turns drafts for one trace on one machine into plans.

    Args:
        replay: the trace and its costs.
        min_bytes: smaller storages always stay.
    """

    def __init__(self, replay: PreparedTrace, min_bytes: int) -> None:
        trace = replay.trace
        self.replay, self.min_bytes = replay, min_bytes
        self.movable = frozenset(storage for storage in trace.movable if trace.storages[storage].nbytes >= min_bytes)
        self.gaps: dict[Key, Gap] = {
            (storage, gap.index): gap
            for storage, gaps in trace.gaps.items()
            if storage in self.movable
            for gap in gaps
            if trace.storages[storage].released < gap.closes  # else the program holds it throughout
        }
        self.graph = TraceGraph(trace)
        self.event_ticks = sorted({event.tick for event in replay.events})
        self.begins: list[float] = replay.begins.tolist()
        self._event_begins = [self.begins[tick] for tick in self.event_ticks]

    def find_closure(self, storage: int, tick: int, is_dropped: Callable[[int], bool]) -> Closure | None:
        """Find what it takes to make a storage at `tick`, when the storages for which `is_dropped` holds are gone."""
        return find_closure(self.graph.at(tick, is_dropped), storage)

    def finish(self, draft: Draft, strategy: str, budget_bytes: int) -> Plan | None:
        """The plan of a draft; None if something it drops cannot be replayed."""
        built = self._build_segments(draft)
        if built is None:
            return None
        segments, segment_of, wanted = built
        decisions = self._schedule(draft, wanted)
        runs: dict[int, int] = {}  # when each segment is replayed
        for key, segment in segment_of.items():
            runs[segment] = min(runs.get(segment, self.gaps[key].closes), self.gaps[key].closes)
        for key, segment in segment_of.items():
            storage, index = key
            # A dropped storage lives on in its leaves, so they must have been saved before it goes.
            leaves = (self.graph.claim_at(leaf, runs[segment]) for leaf in segments[segment].leaves)
            leave = max(self.gaps[key].opens, *leaves, 0)
            if leave >= self.gaps[key].closes:
                return None
            decisions.append(
                Decision(storage=storage, gap=index, choice=Choice.RECOMPUTE, leave=leave, release=leave,
                         back=self.gaps[key].closes, segment=segment)
            )  # fmt: skip
        decisions.sort(key=lambda decision: (decision.storage, decision.gap))
        return Plan(
            trace_digest=self.replay.costs.trace_digest,
            strategy=strategy,
            budget_bytes=budget_bytes,
            decisions=tuple(decisions),
            segments=tuple(segments),
        )

    def _build_segments(self, draft: Draft) -> tuple[list[Segment], dict[Key, int], dict[int, list[int]]] | None:
        """Segments in order of use, which gap each fills, and when each leaf is wanted."""
        dropped = sorted(
            (self.gaps[key] for key, option in draft.items() if option.choice is Choice.RECOMPUTE),
            key=lambda gap: (gap.closes, gap.storage),
        )
        open_gaps: dict[int, list[Gap]] = {}
        for gap in dropped:
            open_gaps.setdefault(gap.storage, []).append(gap)
        segments: list[Segment] = []
        segment_of: dict[Key, int] = {}
        wanted: dict[int, list[int]] = {}

        def find_open(storage: int, tick: int) -> Gap | None:
            for gap in open_gaps.get(storage, ()):
                if gap.opens < tick <= gap.closes and (storage, gap.index) not in segment_of:
                    return gap
            return None

        for gap in dropped:
            if (gap.storage, gap.index) in segment_of:
                continue
            tick = gap.closes
            closure = self.find_closure(gap.storage, tick, lambda storage: find_open(storage, tick) is not None)  # noqa: B023
            if closure is None:
                return None
            outputs = []
            for storage in sorted(closure.made):
                filled = find_open(storage, tick)
                if filled is not None:
                    segment_of[storage, filled.index] = len(segments)
                    outputs.append(storage)
            for leaf in closure.leaves:
                wanted.setdefault(leaf, []).append(tick)
            segments.append(Segment(ops=closure.ops, outputs=tuple(outputs), leaves=closure.leaves))
        return segments, segment_of, wanted

    def _schedule(self, draft: Draft, wanted: dict[int, list[int]]) -> list[Decision]:
        """Moves of the offloaded gaps: out as early as the link allows, back just in time."""
        link = self.replay.costs.link
        storages = self.replay.trace.storages
        moves: list[tuple[Gap, Option, int]] = []
        for key, option in draft.items():
            if option.choice is Choice.OFFLOAD:
                gap = self.gaps[key]
                early = [tick for tick in wanted.get(gap.storage, ()) if gap.opens < tick < gap.closes]
                moves.append((gap, option, min([*early, gap.closes])))
        moves.sort(key=lambda move: (move[0].opens, move[0].storage))
        releases: dict[Key, int] = {}
        copied: set[Key] = set()  # a copy lasts as long as its claim
        lane_free = 0.0
        for gap, option, _ in moves:
            releases[gap.storage, gap.index] = gap.opens if option.release is None else option.release
            claim = (gap.storage, self.graph.claim_at(gap.storage, gap.closes))
            if claim not in copied:
                copied.add(claim)
                lane_free = max(lane_free, self.begins[gap.opens]) + offload_seconds(link, storages[gap.storage].nbytes)
                if not option.release_now and option.release is None:
                    releases[gap.storage, gap.index] = self._event_after(lane_free, gap.opens)
        moves.sort(key=lambda move: (-move[2], move[0].storage))
        decisions = []
        lane_begin = float("inf")
        for gap, option, closes in moves:
            release = releases[gap.storage, gap.index]
            if release >= closes:
                continue  # the link is too slow for this gap
            back = closes if option.back is None else min(closes, option.back)
            if not option.on_demand and option.back is None:
                lane_begin = min(lane_begin, self.begins[closes]) - reload_seconds(link, storages[gap.storage].nbytes)
                # Not while the program still holds it: both would be there.
                gone = max(self._next_event(release), self._event_after(0.0, storages[gap.storage].released))
                back = min(closes, max(self._event_before(lane_begin), gone))
            decisions.append(
                Decision(storage=gap.storage, gap=gap.index, choice=Choice.OFFLOAD, leave=gap.opens, release=release,
                         back=back, segment=-1)
            )  # fmt: skip
        return decisions

    def _event_after(self, seconds: float, tick: int) -> int:
        """The first event, not before `tick`, at or after a time of the plain step."""
        index = max(bisect.bisect_left(self._event_begins, seconds), bisect.bisect_left(self.event_ticks, tick))
        return self.event_ticks[min(index, len(self.event_ticks) - 1)]

    def _event_before(self, seconds: float) -> int:
        index = bisect.bisect_right(self._event_begins, seconds) - 1
        return self.event_ticks[max(index, 0)]

    def _next_event(self, tick: int) -> int:
        index = bisect.bisect_right(self.event_ticks, tick)
        return self.event_ticks[min(index, len(self.event_ticks) - 1)]
