"""An online policy on the virtual clock: what is cheapest to miss is evicted when room is needed, and replayed on need.

    op needs room  ->  evict the storage of the lowest score, until it fits
    op reads what is gone  ->  replay the op that made it, and first, in the same way, what that op reads

Nothing is known of what comes next, nothing moves to another tier, and what was replayed stays until it is evicted
again. That is how Dynamic Tensor Rematerialization works; here it runs over a Trace, so that what it makes of a step
can be compared with a plan for that step, and this simulation with that system's own measurements.

Source: M. Kirisame, S. Lyubomirsky, A. Haan, J. Brennan, M. He, J. Roesch, T. Chen, Z. Tatlock, "Dynamic Tensor
Rematerialization", ICLR 2021, section 4 (scores) and appendix C (the simulator: eager eviction of what was released,
results locked at the end). Inferred: views are not kept apart from what they look at, so that one replay brings all of
them back; of equal scores the lowest storage id goes.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from elbowroom.errors import TraceError
from elbowroom.ir.costs import Costs
from elbowroom.ir.trace import PERSISTENT_ROLES, Op, Trace
from elbowroom.residency.evicted_sets import EvictedSets
from elbowroom.simulator.planned import round_up


class Score(enum.StrEnum):
    """What is cheapest to miss. Cost is of replaying, staleness since the last access."""

    EQ = "eq"
    """(own cost + that of the neighbouring sets of evicted storages) / (bytes x staleness), the sets joined in a
    union-find that never splits."""
    LOCAL = "local"
    """Own cost / (bytes x staleness)."""
    LRU = "lru"
    """The time of the last access."""


class Ending(enum.StrEnum):
    """How a run ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    GAVE_UP = "gave up"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One step under the policy.

    Attributes:
        op: where it ended, an index in `Trace.ops`; their number if it finished.
        peak_bytes: most that was on the device at once.
        compute_seconds: the ops that ran, each once.
        recompute_seconds: replays.
        evictions: of storages that were still to be used, as far as the policy knew.
    """

    ending: Ending
    op: int
    peak_bytes: int
    compute_seconds: float
    recompute_seconds: float
    evictions: int


def run_online(
    trace: Trace, costs: Costs, budget_bytes: int, *, score: Score = Score.EQ, most_recompute: float = 1.0
) -> Outcome:
    """Run a step within a budget, evicting and replaying.

    Args:
        most_recompute: give up when replays have taken so many times the step's compute seconds.

    Raises:
        TraceError: the costs belong to another trace.

    Cost: of each eviction, linear in the storages on the device.
    """
    if len(costs.op_seconds) != len(trace.ops):
        raise TraceError(f"costs of {len(costs.op_seconds)} ops do not fit a trace of {len(trace.ops)}")
    return _Run(trace, costs, budget_bytes, score, most_recompute * math.fsum(costs.op_seconds)).finish()


class _Stop(Exception):
    def __init__(self, ending: Ending) -> None:
        super().__init__(ending)
        self.ending = ending


class _Facts:
    """What of a trace the policy needs, by storage id or index of the op.

    Attributes:
        ends: the tick before which a storage's last holder lets go.
        reads, makes: storages that an op reads; those it creates.
        maker: the op that made a storage; -1 if it was there.
        neighbours: storages that are read to make a storage, or made from it.
        evictable: whether a storage may go: its replay is possible for as long as it can be wanted.
    """

    def __init__(self, trace: Trace, costs: Costs) -> None:
        count = len(trace.storages)
        self.rounded: list[int] = round_up([home.nbytes for home in trace.storages], costs.alignment_bytes).tolist()
        self.ends = [home.released for home in trace.storages]
        for save in trace.saves:
            self.ends[save.storage] = max(self.ends[save.storage], save.released)
        for need in trace.needs:
            storage = trace.saves[need.save].storage
            self.ends[storage] = max(self.ends[storage], need.released)
        self.reads = [tuple(dict.fromkeys(view.storage for view in op.reads)) for op in trace.ops]
        self.makes = [_list_made(trace, op) for op in trace.ops]
        self.maker = [-1] * count
        self.cost = [0.0] * count
        self.neighbours: list[list[int]] = [[] for _ in range(count)]
        for index, (op, made) in enumerate(zip(trace.ops, self.makes, strict=True)):
            # An op that only reads makes a view of what it reads first.
            for storage in made if op.writes else self.reads[index][:1]:
                self.cost[storage] += costs.op_seconds[index]
            for storage in made:
                self.maker[storage] = index
                self.neighbours[storage] += self.reads[index]
                for read in self.reads[index]:
                    self.neighbours[read].append(storage)
        self.evictable = self._find_evictable(trace)

    def _find_evictable(self, trace: Trace) -> list[bool]:
        writes: list[list[int]] = [[] for _ in trace.storages]  # ticks of versions 1, 2, ...
        for op in trace.ops:
            for view in op.writes:
                if view.version > 0:
                    writes[view.storage].append(op.tick)
        evictable = [False] * len(trace.storages)
        until = [-1] * len(trace.storages)  # the tick until which an evictable one can be replayed
        for op, made in zip(trace.ops, self.makes, strict=True):
            limit = -1 if op.barrier else trace.end
            for view in op.reads:
                later = writes[view.storage][view.version :]
                held = until[view.storage] if evictable[view.storage] else self.ends[view.storage]
                limit = min(limit, held, *later)
            for storage in made:
                home = trace.storages[storage]
                until[storage] = limit
                is_ours = home.role not in PERSISTENT_ROLES and not writes[storage]
                evictable[storage] = is_ours and limit >= self.ends[storage]
        return evictable


def _list_made(trace: Trace, op: Op) -> tuple[int, ...]:
    return tuple(view.storage for view in op.writes if trace.storages[view.storage].created == op.tick)


@dataclasses.dataclass(slots=True)
class _Frame:
    """An op that waits for what it reads."""

    op: int
    missing: list[int]


class _Run:
    """One step."""

    def __init__(self, trace: Trace, costs: Costs, budget_bytes: int, score: Score, patience: float) -> None:
        self._trace, self._seconds, self._workspace = trace, costs.op_seconds, costs.workspace_bytes
        self._budget = budget_bytes
        self._score, self._patience = score, patience
        self._facts = facts = _Facts(trace, costs)
        count = len(trace.storages)
        self._present = [home.created < 0 for home in trace.storages]
        self._exists = list(self._present)  # was made, and can be again
        self._locks = [0] * count
        self._last_access = [-math.inf] * count
        self._classes = EvictedSets()
        self._pool: set[int] = set()
        self._held = self._peak = sum(facts.rounded[home.id] for home in trace.storages if home.created < 0)
        self._clock = self._recompute = self._compute = 0.0
        self._evictions = 0

    def finish(self) -> Outcome:
        """Run it to its end, or to where it stops."""
        ops, facts = self._trace.ops, self._facts
        by_end = sorted(range(len(facts.ends)), key=lambda storage: -facts.ends[storage])
        index, ending = 0, Ending.FINISHED
        try:
            for index, op in enumerate(ops):
                while by_end and facts.ends[by_end[-1]] <= op.tick:
                    self._let_go(by_end.pop())
                self._produce(index)
            index = len(ops)
            while by_end and facts.ends[by_end[-1]] < self._trace.end:
                self._let_go(by_end.pop())
            # What is left outlives the step, and has to be there when it ends.
            for storage in sorted(by_end):
                if not self._present[storage]:
                    self._produce(facts.maker[storage])
                self._lock(storage)
        except _Stop as stop:
            ending = stop.ending
        return Outcome(
            ending=ending,
            op=index,
            peak_bytes=self._peak,
            compute_seconds=self._compute,
            recompute_seconds=self._recompute,
            evictions=self._evictions,
        )

    def _let_go(self, storage: int) -> None:
        """The last holder lets go: what can be replayed counts as evicted, since others may be replayed from it."""
        if not self._present[storage] or self._facts.evictable[storage]:
            if self._present[storage]:
                self._evict(storage)
            return
        self._present[storage] = False
        self._held -= self._facts.rounded[storage]

    def _produce(self, op: int) -> None:
        """Run an op, replaying before it what it reads and is not there."""
        stack = [self._open(op)]
        while stack:
            frame = stack[-1]
            while frame.missing and self._present[frame.missing[-1]]:
                self._lock(frame.missing.pop())
            if frame.missing:
                stack.append(self._open(self._facts.maker[frame.missing[-1]]))
                continue
            stack.pop()
            self._execute(frame.op)

    def _open(self, op: int) -> _Frame:
        reads = self._facts.reads[op]
        for storage in reads:
            self._last_access[storage] = self._clock
        for storage in reads:
            if self._present[storage]:
                self._lock(storage)
        return _Frame(op, [storage for storage in reversed(reads) if not self._present[storage]])

    def _execute(self, op: int) -> None:
        facts = self._facts
        made = facts.makes[op]
        total = sum(facts.rounded[storage] for storage in made)
        while self._held + total + self._workspace[op] > self._budget:
            if not self._pool:
                raise _Stop(Ending.OUT_OF_MEMORY)
            self._evict(min(self._pool, key=self._rate))
            self._evictions += 1
        self._clock += self._seconds[op]
        self._held += total
        self._peak = max(self._peak, self._held + self._workspace[op])
        self._book(op)
        for storage in made:
            if self._present[storage]:
                self._held -= facts.rounded[storage]  # made a second time beside what was missing
                continue
            self._present[storage] = True
            if self._exists[storage]:
                self._classes.take(storage, facts.cost[storage])
            else:
                self._exists[storage] = True
                self._last_access[storage] = self._clock
            if facts.evictable[storage]:
                self._pool.add(storage)
        for storage in facts.reads[op]:
            self._unlock(storage)

    def _book(self, op: int) -> None:
        """A first run or a replay: an op whose results were there before is a replay."""
        made = self._facts.makes[op]
        if made and self._exists[made[0]]:
            self._recompute += self._seconds[op]
            if self._recompute > self._patience:
                raise _Stop(Ending.GAVE_UP)
        else:
            self._compute += self._seconds[op]

    def _evict(self, storage: int) -> None:
        self._present[storage] = False
        self._pool.discard(storage)
        self._held -= self._facts.rounded[storage]
        self._classes.add(storage, self._facts.cost[storage], self._gone_beside(storage))

    def _gone_beside(self, storage: int) -> list[int]:
        facts = self._facts
        return [
            each
            for each in facts.neighbours[storage]
            if self._exists[each] and not self._present[each] and facts.evictable[each]
        ]

    def _rate(self, storage: int) -> tuple[float, int]:
        """The score: the lowest is evicted."""
        if self._score is Score.LRU:
            return self._last_access[storage], storage
        cost = self._facts.cost[storage]
        if self._score is Score.EQ:
            cost += sum(map(self._classes.cost, {self._classes.find(each) for each in self._gone_beside(storage)}))
        weight = self._facts.rounded[storage] * (self._clock - self._last_access[storage])
        return (cost / weight if weight > 0 else math.inf), storage

    def _lock(self, storage: int) -> None:
        self._locks[storage] += 1
        self._pool.discard(storage)

    def _unlock(self, storage: int) -> None:
        self._locks[storage] -= 1
        if not self._locks[storage] and self._facts.evictable[storage]:
            self._pool.add(storage)
