"""Policies of other offloading systems as plans for imported traces: walks over a step's events, on a clock with lanes.

A walk decides at each event, by what it knows then, which blocks leave and which come back. What it leaves behind is
an ordinary plan: Elbowroom's judge passes it and Elbowroom's simulator forecasts it, so that the walk's own clock
proves nothing.

`lru` is the plainest walk; `flashneuron.py` and `vitality.py` have two others. Whole blocks move, where some of these
systems move pages, and parameters stay.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from elbowroom.ir.check import check
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.gaps import Gap
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.clock import Lanes
from elbowroom.simulator.planned import PreparedTrace

Key = tuple[int, int]


class Job:
    """A trace on a machine, with what all policies ask for.

    Attributes:
        gaps: of what may move, by key.
        leaves: by key, the first tick at which the block can be gone: nothing else holds it from there on.
        live: bytes during each entry if nothing moves.
        events: ticks at which something can move.
        begins: plain start second of each tick.
        ends: by storage, the tick before which its last holder lets go.
        working_bytes: most that one op reads and writes; without what was there before the step.
    """

    def __init__(self, trace: Trace, costs: Costs) -> None:
        self.trace, self.costs = trace, costs
        self.replay = PreparedTrace(trace, costs)
        movable = trace.movable
        found = trace.gaps
        self.gaps = {(each.storage, each.index): each for key in movable for each in found.get(key, ())}
        held = {(trace.saves[need.save].storage, need.tick): need.released for need in trace.needs}
        self.leaves = {
            key: max(gap.opens + 1, held.get((gap.storage, gap.opens), 0), trace.storages[gap.storage].released)
            for key, gap in self.gaps.items()
        }
        self.plain = self.replay.run(self.plan("plain", ()))
        self.live = np.array(self.plain.live_bytes, dtype=np.int64)
        self.events = sorted(event.tick for event in (*trace.saves, *trace.needs))
        self.begins = self.replay.begins
        self.ends = {home.id: home.released for home in trace.storages}
        for save in trace.saves:
            self.ends[save.storage] = max(self.ends[save.storage], save.released)
        used = [{view.storage for view in (*op.reads, *op.writes)} for op in trace.ops]
        self.working_bytes = (
            max(sum(self.size(each) for each in op) for op in used),
            max(sum(self.size(each) for each in op if trace.storages[each].created >= 0) for op in used),
        )

    def size(self, storage: int) -> int:
        """Bytes of a storage."""
        return self.trace.storages[storage].nbytes

    def event_before(self, tick: int) -> int:
        """The last event before a tick; the first of all if there is none."""
        return self.events[max(bisect.bisect_left(self.events, tick) - 1, 0)]

    def plan(self, name: str, decisions: tuple[Decision, ...]) -> Plan:
        """A plan of these decisions."""
        decisions = tuple(sorted(decisions, key=lambda each: (each.storage, each.gap)))
        return Plan(
            trace_digest=self.costs.trace_digest, strategy=name, budget_bytes=0, decisions=decisions, segments=()
        )

    def forecast(self, name: str, decisions: tuple[Decision, ...]) -> Forecast:
        """What the judge lets pass, the simulator forecasts."""
        made = self.plan(name, decisions)
        check(self.trace, made)
        return self.replay.run(made)


@dataclasses.dataclass(slots=True)
class Away:
    """A gap that is being spent away: sent out at `leave`, given up at `release`; -1 until then."""

    gap: Gap
    leave: int
    done: float
    release: int = -1


class Walk:
    """One pass over the events within a budget.

    Args:
        wanted: gaps to send out as they open.
        backs: when each of these is fetched, at the latest by its need.
        evicts: whether what is not planned leaves under pressure, least recently used first.
    """

    def __init__(
        self,
        job: Job,
        budget_bytes: int,
        *,
        wanted: frozenset[Key] = frozenset(),
        backs: dict[Key, int] | None = None,
        evicts: bool = False,
    ) -> None:
        self.job, self.budget = job, budget_bytes
        self.wanted, self.backs, self.evicts = wanted, backs or {}, evicts
        self.live = job.live.copy()
        self.lanes = Lanes(job.costs.link)
        self.now = self.late = 0.0
        self.open: dict[int, Gap] = {}  # the gap that a resident storage is in; in order of last use
        self.away: dict[int, Away] = {}
        self.clean: set[int] = set()
        self.arriving: dict[int, float] = {}
        self.due: list[Key] = []  # planned to be fetched by now, and not there yet
        self.decisions: list[Decision] = []

    def run(self) -> tuple[Decision, ...]:
        """The moves."""
        job = self.job
        opening: dict[int, list[Gap]] = {}
        closing = {gap.closes: gap for gap in job.gaps.values()}
        for gap in job.gaps.values():
            opening.setdefault(gap.opens, []).append(gap)
        planned = sorted((back, key) for key, back in self.backs.items())
        for position, tick in enumerate(job.events):
            self.now = float(job.begins[tick]) + self.late
            if tick in closing:
                self._close(closing[tick], tick)
            for gap in opening.get(tick, ()):
                self._open(gap, tick)
            self._give_up_what_is_out(tick)
            until = job.events[position + 1] if position + 1 < len(job.events) else job.trace.end - 1
            self._make_room(tick, until)
            while planned and planned[0][0] <= tick:
                self.due.append(planned.pop(0)[1])
            self.due = [key for key in self.due if not self._fetch_planned(key, tick)]
            self._fetch_early(tick)
        return tuple(self._in_order_of_need())

    def _in_order_of_need(self) -> list[Decision]:
        """Reloads of one event would begin in order of storage: each but the first needed is put off by an event."""
        events, closes = self.job.events, {key: gap.closes for key, gap in self.job.gaps.items()}
        found: list[Decision] = []
        free = 0
        for each in sorted(self.decisions, key=lambda each: (each.back, closes[each.storage, each.gap])):
            position = max(free, bisect.bisect_left(events, each.back))
            back = min(
                events[position] if position < len(events) else self.job.trace.end, closes[each.storage, each.gap]
            )
            free = bisect.bisect_left(events, back) + 1
            found.append(dataclasses.replace(each, back=back))
        return found

    def _open(self, gap: Gap, tick: int) -> None:
        self.open[gap.storage] = gap
        if (gap.storage, gap.index) in self.wanted:
            self._send(gap, tick)

    def _send(self, gap: Gap, tick: int) -> None:
        self.open.pop(gap.storage)
        done = self.now
        if gap.storage not in self.clean:
            self.clean.add(gap.storage)
            done = self.lanes.send(self.job.size(gap.storage), self.now)
        self.away[gap.storage] = Away(gap, tick, done)

    def _give_up(self, each: Away, tick: int) -> None:
        self._wait_until(each.done)
        each.release = tick
        begin = max(tick + 1, self.job.leaves[each.gap.storage, each.gap.index])
        self.live[begin : each.gap.closes] -= self.job.size(each.gap.storage)

    def _wait_until(self, done: float) -> None:
        self.late += max(0.0, done - self.now)
        self.now = max(self.now, done)

    def _give_up_what_is_out(self, tick: int) -> None:
        for each in self.away.values():
            if each.release < 0 and each.done <= self.now and tick < each.gap.closes:
                self._give_up(each, tick)

    def _make_room(self, tick: int, until: int) -> None:
        """What is on its way out is waited for first, then the least recently used is evicted."""
        pending = [each for each in self.away.values() if each.release < 0 and each.gap.closes > until]
        while self.live[tick + 1 : until + 1].max(initial=0) > self.budget:
            if pending:
                self._give_up(pending.pop(0), tick)
                continue
            victims = (gap for gap in self.open.values() if gap.closes > until and self._helps(gap, until))
            gap = next(victims, None) if self.evicts else None
            if gap is None:
                return
            self._send(gap, tick)
            self._give_up(self.away[gap.storage], tick)

    def _helps(self, gap: Gap, until: int) -> bool:
        return self.job.leaves[gap.storage, gap.index] <= until

    def _close(self, gap: Gap, tick: int) -> None:
        """A need: what is away is fetched now, and waited for."""
        each = self.away.get(gap.storage)
        if each is not None:
            self._fetch(each, tick)
        self.open.pop(gap.storage, None)
        self._wait_until(self.arriving.pop(gap.storage, 0.0))

    def _fetch(self, each: Away, tick: int) -> None:
        gap = self.away.pop(each.gap.storage).gap
        if each.release < 0:
            return  # still here: it was sent for nothing, and is as good as kept
        begin = max(tick, self.job.leaves[gap.storage, gap.index])
        self.live[begin : gap.closes] += self.job.size(gap.storage)
        self.arriving[gap.storage] = self.lanes.fetch(self.job.size(gap.storage), self.now)
        self.decisions.append(
            Decision(storage=gap.storage, gap=gap.index, choice=Choice.OFFLOAD, leave=each.leave, release=each.release,
                     back=tick, segment=-1)
        )  # fmt: skip

    def _fits(self, each: Away, tick: int) -> bool:
        size = self.job.size(each.gap.storage)
        return self.live[tick : each.gap.closes].max(initial=0) + size <= self.budget

    def _fetch_planned(self, key: Key, tick: int) -> bool:
        """Fetch it if it is out and there is room. Returns whether that is settled."""
        each = self.away.get(key[0])
        if each is None or each.gap.index != key[1]:
            return True
        if each.release < 0 or not self._fits(each, tick):
            return False
        self._fetch(each, tick)
        return True

    def _fetch_early(self, tick: int) -> None:
        """What else a policy fetches."""


def lru(job: Job, budget_bytes: int) -> Forecast:
    """Whole blocks on demand, the least recently used out first."""
    return job.forecast("lru", Walk(job, budget_bytes, evicts=True).run())
