"""Assembles a plan for strategies that set every tick themselves.

`draft.Drafter.finish` keeps everything that a replay produces. Here the strategy decides that for each storage: an
intermediate result of a replay may be dropped again and recomputed at its own need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.planner.schedule.draft import Drafter, Key
from elbowroom.planner.schedule.timing import Times

Keeps = Callable[[Key, int], bool]
"""Whether the storage of a dropped gap stays on the device after a replay at this tick produced it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplayStep:
    """One segment and the gaps that it ends.

    Attributes:
        tick: the need that it serves.
        fills: the gaps that it ends; the one of that need comes first.
        leaves: for each of `fills`, the tick at which its storage is dropped: not before everything that the replay
            reads has been saved.
    """

    segment: Segment
    tick: int
    fills: tuple[Key, ...]
    leaves: tuple[int, ...]


def list_replays(
    drafter: Drafter, dropped: Collection[Key], keeps: Keeps, since: Mapping[Key, int] | None = None
) -> Iterator[ReplayStep | Key]:
    """Yield the replays in order of time; stop at a gap that no replay can fill, and yield its key.

    Args:
        keeps: called for each intermediate result of a replay, before that replay is yielded.
        since: the saves or needs at which storages are dropped, for those that are not dropped when their gap opens.

    Cost: linear in the ops replayed.
    """
    since = since or {}
    order = sorted((drafter.gaps[key] for key in dropped), key=lambda gap: (gap.closes, gap.storage))
    empty: dict[int, list[Gap]] = {}
    for gap in order:
        empty.setdefault(gap.storage, []).append(gap)
    filled: set[Key] = set()

    def find_empty(storage: int, tick: int) -> Key | None:
        for gap in empty.get(storage, ()):
            key = (storage, gap.index)
            if since.get(key, gap.opens) < tick <= gap.closes and key not in filled:
                return key
        return None

    for gap in order:
        if (gap.storage, gap.index) in filled:
            continue
        tick = gap.closes
        closure = drafter.find_closure(gap.storage, tick, lambda storage: find_empty(storage, tick) is not None)  # noqa: B023
        if closure is None:
            yield gap.storage, gap.index
            return
        fills = [(gap.storage, gap.index)]
        filled.add(fills[0])
        for storage in sorted(closure.made):
            other = find_empty(storage, tick)
            if other is not None and keeps(other, tick):
                filled.add(other)
                fills.append(other)
        last_saved = max((drafter.graph.claim_at(leaf, tick) for leaf in closure.leaves), default=-1)
        outputs = tuple(sorted(storage for storage, _ in fills))
        yield ReplayStep(
            segment=Segment(ops=closure.ops, outputs=outputs, leaves=closure.leaves),
            tick=tick,
            fills=tuple(fills),
            leaves=tuple(max(since.get(key, drafter.gaps[key].opens), last_saved) for key in fills),
        )


def assemble(
    drafter: Drafter,
    strategy: str,
    budget_bytes: int,
    *,
    offloads: Mapping[Key, Times],
    replays: Sequence[ReplayStep] = (),
) -> Plan:
    """Build the plan. An offloaded storage that a replay reads is reloaded by then, whatever its times say."""
    decisions: list[Decision] = []
    for segment, replay in enumerate(replays):
        for key, leave in zip(replay.fills, replay.leaves, strict=True):
            decisions.append(_decide(key, Choice.RECOMPUTE, leave, leave, drafter.gaps[key].closes, segment))
    for key, times in offloads.items():
        leave = drafter.gaps[key].opens if times.leave is None else times.leave
        decisions.append(_decide(key, Choice.OFFLOAD, leave, times.release, times.back, -1))
    decisions.sort(key=lambda decision: (decision.storage, decision.gap))
    return Plan(
        trace_digest=drafter.replay.costs.trace_digest,
        strategy=strategy,
        budget_bytes=budget_bytes,
        decisions=tuple(decisions),
        segments=tuple(replay.segment for replay in replays),
    )


def _decide(key: Key, choice: Choice, leave: int, release: int, back: int, segment: int) -> Decision:
    return Decision(storage=key[0], gap=key[1], choice=choice, leave=leave, release=release, back=back, segment=segment)
