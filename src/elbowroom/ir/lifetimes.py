"""When each storage is on the device: in a step where everything stays, and as a plan would have it.

    program   |=========|
    claim            |======|   (away)    |========|
    node                                       |===|
    there     |=============|             |========|

Exact for a step without a plan. Under a plan moves take effect at the next save or need, so a page that needs the
exact bytes at a tick takes them from the forecast; this says which storages they belong to.
"""

from __future__ import annotations

import bisect
import itertools

from elbowroom.ir.costs import Costs
from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.trace import Span, Trace


class Lifetimes:
    """Where the bytes of one trace are.

    Args:
        trace: the step.
        plan: what leaves and comes back; nothing does without one.
    """

    def __init__(self, trace: Trace, plan: Plan | None = None) -> None:
        self.trace = trace
        self.gaps = trace.gaps
        self.claims = trace.claims
        self._nodes: dict[int, list[Span]] = {}
        for need in trace.needs:
            self._nodes.setdefault(trace.saves[need.save].storage, []).append((need.tick, need.released))
        self.decisions: dict[int, list[Decision]] = {}
        for decision in () if plan is None else plan.decisions:
            if decision.choice is not Choice.KEEP:
                self.decisions.setdefault(decision.storage, []).append(decision)

    def spans(self, storage: int) -> list[Span]:
        """The joined spans during which a storage is on the device, in order."""
        home = self.trace.storages[storage]
        spans = [(home.created, home.released), *self._nodes.get(storage, ())]
        for begin, end in self.claims.get(storage, ()):
            since = begin
            for decision in self.decisions.get(storage, ()):
                if begin <= decision.leave < end:
                    spans.append((since, self._leaves(decision) + 1))
                    since = min(decision.back, end)
            spans.append((since, end))
        return _join(spans)

    def is_there(self, storage: int, tick: int) -> bool:
        """Return True if a storage is on the device during an entry."""
        return any(begin <= tick < end for begin, end in self.spans(storage))

    def decision_at(self, storage: int, tick: int) -> Decision | None:
        """The decision in whose gap a tick lies."""
        for decision in self.decisions.get(storage, ()):
            if self.gap_of(decision).covers(tick):
                return decision
        return None

    def gap_of(self, decision: Decision) -> Gap:
        """The gap a decision is for."""
        return self.gaps[decision.storage][decision.gap]

    def count_plain(self, costs: Costs) -> list[int]:
        """Bytes on the device during each entry if nothing ever leaves, workspace included.

        Cost: linear in the trace.
        """
        change = [0] * (self.trace.end + 1)
        for storage in self.trace.storages:
            nbytes = -(-storage.nbytes // costs.alignment_bytes) * costs.alignment_bytes
            home = (storage.created, storage.released)
            spans = [home, *self._nodes.get(storage.id, ())]
            spans.extend(self.claims.get(storage.id, ()))
            for begin, end in _join(spans):
                change[max(begin, 0)] += nbytes
                change[end] -= nbytes
        live = list(itertools.accumulate(change[:-1]))
        for op, workspace_bytes in zip(self.trace.ops, costs.workspace_bytes, strict=True):
            live[op.tick] += workspace_bytes
        return live

    def op_at(self, tick: int) -> int | None:
        """Index in `Trace.ops` of the op at a tick, or of the last one before it; None before the first."""
        index = bisect.bisect_right(self.trace.ops, tick, key=lambda op: op.tick) - 1
        return index if index >= 0 else None

    @staticmethod
    def _leaves(decision: Decision) -> int:
        return decision.release if decision.choice is Choice.OFFLOAD else decision.leave


def _join(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined
