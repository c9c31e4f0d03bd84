"""Spans during which each storage is on the device, without a plan or under one.

    program   |=========|
    claim            |======|   (away)    |========|
    node                                       |===|
    on device |=============|             |========|

Exact without a plan. Under a plan moves take effect only at the next save or need: reports take the exact bytes at a
tick from the forecast, and from here the storages that they belong to.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from elbowroom.ir.costs import Costs
from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.state import list_away
from elbowroom.ir.trace import Span, Trace


class Lifetimes:
    """Lifetimes of the storages of one trace on the device.

    Args:
        plan: moves of storages; None if all stay.
    """

    def __init__(self, trace: Trace, plan: Plan | None = None) -> None:
        self.trace = trace
        self.gaps = trace.gaps
        self.claims = trace.claims
        self._nodes: dict[int, list[Span]] = {}
        for need in trace.needs:
            self._nodes.setdefault(trace.saves[need.save].storage, []).append((need.tick, need.released))
        self._away = {} if plan is None else list_away(trace, plan)
        self.decisions: dict[int, list[Decision]] = {}
        for decision in () if plan is None else plan.decisions:
            if decision.choice is not Choice.KEEP:
                self.decisions.setdefault(decision.storage, []).append(decision)
        self._state_decisions: dict[int, list[Decision]] = {}
        for decision in () if plan is None else plan.state:
            self._state_decisions.setdefault(decision.storage, []).append(decision)

    def spans(self, storage: int) -> list[Span]:
        """Return the merged spans during which a storage is on the device, in order."""
        home = self.trace.storages[storage]
        spans = [(home.created, home.released), *self._nodes.get(storage, ())]
        for begin, end in self.claims.get(storage, ()):
            since = begin
            for decision in self.decisions.get(storage, ()):
                if begin <= decision.leave < end:
                    spans.append((since, self._leaves(decision) + 1))
                    since = min(decision.back, end)
            spans.append((since, end))
        return cut(_join(spans), self._away.get(storage, ()))

    def is_there(self, storage: int, tick: int) -> bool:
        """Return True if a storage is on the device during an entry."""
        return any(begin <= tick < end for begin, end in self.spans(storage))

    def decision_at(self, storage: int, tick: int) -> Decision | None:
        """Return the decision whose gap covers a tick; None if there is none."""
        for decision in [*self.decisions.get(storage, []), *self._state_decisions.get(storage, [])]:
            if self.gap_of(decision).covers(tick):
                return decision
        return None

    def gap_of(self, decision: Decision) -> Gap:
        """Return the gap of a decision."""
        gaps = self.trace.state_gaps if decision.storage in self.trace.state else self.gaps
        return gaps[decision.storage][decision.gap]

    def count_plain(self, costs: Costs) -> list[int]:
        """Return the bytes on the device during each entry if nothing leaves, workspaces included.

        Cost: linear in the trace.
        """
        live = self.count_storages(costs.alignment_bytes)
        for op, workspace_bytes in zip(self.trace.ops, costs.workspace_bytes, strict=True):
            live[op.tick] += workspace_bytes
        return live

    def count_storages(self, alignment_bytes: int) -> list[int]:
        """Return the bytes of the storages on the device during each entry if nothing leaves.

        Cost: linear in the trace.
        """
        change = [0] * (self.trace.end + 1)
        for storage in self.trace.storages:
            nbytes = -(-storage.nbytes // alignment_bytes) * alignment_bytes
            home = (storage.created, storage.released)
            spans = [home, *self._nodes.get(storage.id, ())]
            spans.extend(self.claims.get(storage.id, ()))
            for begin, end in _join(spans):
                change[max(begin, 0)] += nbytes
                change[end] -= nbytes
        return list(itertools.accumulate(change[:-1]))

    def op_at(self, tick: int) -> int | None:
        """Return the index in `Trace.ops` of the last op at or before a tick; None before the first."""
        index = bisect.bisect_right(self.trace.ops, tick, key=lambda op: op.tick) - 1
        return index if index >= 0 else None

    @staticmethod
    def _leaves(decision: Decision) -> int:
        return decision.release if decision.choice is Choice.OFFLOAD else decision.leave


def cut(spans: Sequence[Span], away: Sequence[Span]) -> list[Span]:
    """Return spans without the ticks of others."""
    left = list(spans)
    for gone, back in away:
        parts = [part for begin, end in left for part in ((begin, min(end, gone)), (max(begin, back), end))]
        left = [(begin, end) for begin, end in parts if begin < end]
    return left


def _join(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined
