"""A step that nobody planned, on the virtual clock: the policies of `residency.policies` over a trace.

Room is made before each op, reload and replay, as `runtime.online_engine` does it; what the program or a running node
holds stays. Bytes are exact, as far as the trace is; seconds are those of the costs, with one lane each way.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from elbowroom._family import get
from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.errors import Infeasible, TraceError
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import Event, PressureRaised, StorageFreed
from elbowroom.ir.plan import Segment
from elbowroom.ir.trace import Trace
from elbowroom.layout.caching import CachingAllocator
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.machine import Machine, count_reads
from elbowroom.simulator.backtrack import Backtrack, Way
from elbowroom.simulator.lanes import Lanes
from elbowroom.simulator.replay import list_events, round_up

MIN_BYTES = 1 << 14


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a step went.

    Attributes:
        peak_bytes: most that was on the device at once.
        recompute_seconds, stall_seconds: of `step_seconds`, in replays, and waiting for copies.
        evictions: storages that left.
        replays: segments that were computed again.
    """

    peak_bytes: int
    step_seconds: float
    recompute_seconds: float
    stall_seconds: float
    offloaded_bytes: int
    reloaded_bytes: int
    evictions: int
    replays: int


def simulate_dynamic(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    *,
    policy: str = "delta",
    min_bytes: int = MIN_BYTES,
    most_seconds: float = math.inf,
    history: AccessHistory | None = None,
) -> Course:
    """One step of `trace` within a budget, decided on as it goes.

    Args:
        policy: a member of `residency.policies`.
        min_bytes: smaller storages never leave.
        most_seconds: give up when the step has taken so long.
        habits: what earlier steps taught; this one is added to it.

    Raises:
        Infeasible: an op, a reload or a replay finds no room, or the time is over; names it.
        UnknownMember: there is no such policy.
        TraceError: the costs belong to another trace.
    """
    if len(costs.op_seconds) != len(trace.ops):
        raise TraceError(f"costs of {len(costs.op_seconds)} ops do not fit a trace of {len(trace.ops)}")
    return _Step(trace, costs, budget_bytes, policy, min_bytes, most_seconds, history or AccessHistory()).finish()


class _Step:
    """The driver: feeds the machine, and answers what the policy asks (`residency.online.Facts`)."""

    def __init__(
        self, trace: Trace, costs: Costs, budget_bytes: int, policy: str, min_bytes: int, most_seconds: float,
        history: AccessHistory,
    ) -> None:  # fmt: skip
        self._trace, self._costs, self._budget = trace, costs, budget_bytes
        self._most_seconds = most_seconds
        self._rounded: list[int] = round_up([home.nbytes for home in trace.storages], costs.alignment_bytes).tolist()
        self._movable = {storage for storage in trace.movable if trace.storages[storage].nbytes >= min_bytes}
        self._back = Backtrack(trace, costs, self._rounded)
        self._ways: dict[int, Way | None] = {}
        self._segments: list[Segment] = []
        self._segment_ways: list[Way] = []
        chosen = get(policies, policy, "Policy")(self, history)
        self._machine = Machine(chosen, self._segments)
        self._allocator = CachingAllocator() if chosen.uses_addresses else None
        self._addresses: dict[int, int] = {}
        self._lanes = Lanes(costs.link)
        self._done: dict[int, float] = {}
        self._copied: set[int] = set()
        self._dropped: set[int] = set()
        self._holds = [0] * len(trace.storages)
        self._others = [0] * len(trace.storages)  # of the holds, those of the program and of nodes
        self._claims: set[int] = set()  # on the device
        self._pinned: list[Counter[int]] = []
        self._clock = self._recompute = self._stall = 0.0
        self._live = self._peak = self._most = 0
        self._busy = 0.0
        self._moved = [0, 0]
        self._evictions = self._replays = 0

    # -- the step -------------------------------------------------------------------------------------------------

    def finish(self) -> Course:
        """Run it to its end."""
        trace = self._trace
        events: dict[int, list[Event]] = {}
        for event in list_events(trace):
            events.setdefault(event.tick, []).append(event)
        ends: dict[int, list[int]] = {}
        for home in trace.storages:
            if home.created < 0:
                self._hold(home.id)
            ends.setdefault(home.released, []).append(home.id)
        for need in trace.needs:
            ends.setdefault(need.released, []).append(trace.saves[need.save].storage)
        ops = {op.tick: index for index, op in enumerate(trace.ops)}
        needs = {need.tick: trace.saves[need.save].storage for need in trace.needs}
        for tick in range(trace.end):
            now = events.get(tick, ())
            for event in now:
                if isinstance(event, StorageFreed):
                    self._free(event)
            for storage in ends.get(tick, ()):
                self._let_go(storage)
            if tick in ops:
                self._run(ops[tick])
            for event in now:
                if not isinstance(event, StorageFreed):
                    self._save_or_need(event, is_need=tick in needs)
        return Course(
            peak_bytes=self._peak,
            step_seconds=self._clock + self._costs.overhead_seconds,
            recompute_seconds=self._recompute,
            stall_seconds=self._stall,
            offloaded_bytes=self._moved[0],
            reloaded_bytes=self._moved[1],
            evictions=self._evictions,
            replays=self._replays,
        )

    def _run(self, index: int) -> None:
        op = self._trace.ops[index]
        made = [view.storage for view in op.writes if self._trace.storages[view.storage].created == op.tick]
        made = list(dict.fromkeys(made))
        workspace = self._costs.workspace_bytes[index]
        self._most = max(self._most, self._live + sum(self._rounded[storage] for storage in made) + workspace)
        self._make_room(sum(self._rounded[storage] for storage in made) + workspace, op.name)
        for storage in made:
            self._hold(storage)
        self._peak = max(self._peak, self._live + workspace)
        self._pass(self._costs.op_seconds[index])
        self._busy += self._costs.op_seconds[index]
        self._back.run(index)

    def _save_or_need(self, event: Event, *, is_need: bool) -> None:
        storage = event.storage
        self._pass(self._costs.hook_seconds)
        if not is_need and storage not in self._back.claimed:
            self._back.claimed.add(storage)
            self._claim(storage)
        self._carry_out(self._machine.feed(event))
        if is_need:
            self._hold(storage)

    def _free(self, event: StorageFreed) -> None:
        storage = event.storage
        self._machine.feed(event)
        self._back.claimed.discard(storage)
        self._dropped.discard(storage)
        self._copied.discard(storage)
        self._ways.pop(storage, None)
        if storage in self._claims:
            self._claims.remove(storage)
            self._let_go(storage, is_claim=True)

    def _hold(self, storage: int) -> None:
        self._holds[storage] += 1
        self._others[storage] += 1
        self._begin(storage)

    def _begin(self, storage: int) -> None:
        """It has one holder more; if that is the first, its block is handed out."""
        if self._holds[storage] == 1:
            self._live += self._rounded[storage]
            self._peak = max(self._peak, self._live)
            if self._allocator is not None and self._rounded[storage]:
                self._addresses[storage] = self._allocator.take(self._rounded[storage])

    def _let_go(self, storage: int, *, is_claim: bool = False) -> None:
        self._holds[storage] -= 1
        if not is_claim:
            self._others[storage] -= 1
        if self._holds[storage] == 0:
            self._live -= self._rounded[storage]
            if self._allocator is not None and storage in self._addresses:
                self._allocator.give(self._addresses.pop(storage))

    def _pass(self, seconds: float) -> None:
        self._clock += seconds
        if self._clock > self._most_seconds:
            raise Infeasible(
                needed_bytes=self._budget + 1, budget_bytes=self._budget, op="a step that takes too long",
                is_whole_step=False,
            )  # fmt: skip

    def _make_room(self, nbytes: int, what: str) -> None:
        while (missing := self._live + nbytes - self._budget) > 0:
            actions = self._machine.feed(PressureRaised(missing, 0))
            if not actions:
                needed_bytes = self._budget + missing
                raise Infeasible(needed_bytes=needed_bytes, budget_bytes=self._budget, op=what, is_whole_step=False)
            self._carry_out(actions)

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, actions: Sequence[Action]) -> None:
        self._pinned.append(count_reads(actions, self._segments))
        try:
            for action in actions:
                self._perform(action)
        finally:
            self._pinned.pop()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Recompute):
            self._replay(action)
            return
        storage = action.storage
        nbytes = self._trace.storages[storage].nbytes
        if isinstance(action, Offload):
            self._done[storage] = self._lanes.send(nbytes, self._clock)
            self._copied.add(storage)
            self._moved[0] += nbytes
        elif isinstance(action, Reload):
            if self._holds[storage] == 0:
                self._make_room(self._rounded[storage], f"a reload of {nbytes} bytes")
                self._done[storage] = self._lanes.fetch(nbytes, self._clock)
                self._moved[1] += nbytes
            self._claim(storage)
        elif isinstance(action, Release):
            if storage in self._claims:
                self._claims.remove(storage)
                self._let_go(storage, is_claim=True)
                self._evictions += 1
                if self._machine.segment_of(storage) is not None:
                    self._dropped.add(storage)
        else:
            wait = max(0.0, self._done.pop(storage, 0.0) - self._clock)
            self._stall += wait
            self._pass(wait)

    def _claim(self, storage: int) -> None:
        if storage not in self._claims:
            self._claims.add(storage)
            self._holds[storage] += 1
            self._begin(storage)

    def _replay(self, action: Recompute) -> None:
        way = self._segment_ways[action.segment]
        self._make_room(way.nbytes, f"a replay of {len(way.ops)} ops")
        self._peak = max(self._peak, self._live + way.nbytes)
        self._recompute += way.seconds
        self._replays += 1
        self._pass(way.seconds)
        for output in action.outputs:
            self._dropped.discard(output)
            self._claim(output)
        for leaf in way.leaves:
            self._pinned[-1][leaf] -= 1

    # -- what a policy asks ---------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the step began."""
        return self._clock

    def spare_bytes(self) -> int:
        """Room that nothing takes."""
        return self._budget - self._live

    def budget_bytes(self) -> int:
        """Room there is in all."""
        return self._budget

    def nbytes(self, storage: int) -> int:
        """What a storage takes."""
        return self._rounded[storage]

    def address(self, storage: int) -> int | None:
        """Where a caching allocator puts its block."""
        return self._addresses.get(storage)

    def swap_seconds(self, storage: int) -> float:
        """Out, unless there is a copy, and back."""
        nbytes = self._trace.storages[storage].nbytes
        back = reload_seconds(self._costs.link, nbytes)
        return back if storage in self._copied else back + offload_seconds(self._costs.link, nbytes)

    def own_seconds(self, storage: int) -> float:
        """From its neighbours; infinite where there is no way."""
        way = self._find_way(storage)
        return math.inf if way is None else way.seconds

    def own_bytes(self, storage: int) -> int:
        """With itself."""
        way = self._find_way(storage)
        return 0 if way is None else way.nbytes

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        """Out, and back."""
        return offload_seconds(self._costs.link, nbytes), reload_seconds(self._costs.link, nbytes)

    def busy_seconds(self) -> float:
        """What the step's own ops took."""
        return self._busy

    def held_bytes(self) -> tuple[int, int]:
        """Now, and most since this was last called."""
        most, self._most = self._most, self._live
        return self._live, most

    def replay_seconds(self, storage: int) -> float:
        """With what was dropped or offloaded before it; infinite where there is no way."""
        seconds, seen, stack = 0.0, {storage}, [storage]
        while stack:
            way = self._find_way(stack.pop())
            if way is None:
                return math.inf
            seconds += way.seconds
            for leaf in way.leaves:
                if leaf in self._claims or leaf in seen:
                    continue
                seen.add(leaf)
                if leaf in self._dropped:
                    stack.append(leaf)
                else:
                    seconds += reload_seconds(self._costs.link, self._trace.storages[leaf].nbytes)
        return seconds

    def neighbours(self, storage: int) -> Iterable[int]:
        """The saved storages that it would be computed from."""
        way = self._find_way(storage)
        return () if way is None else way.leaves

    def may_move(self, storage: int) -> bool:
        """Whether it may leave the device at all."""
        return storage in self._movable

    def may_leave(self, storage: int) -> bool:
        """Whether only autograd holds it, and nothing at hand needs it."""
        if storage not in self._claims or self._others[storage]:
            return False
        return not any(counter[storage] > 0 for counter in self._pinned)

    def segment(self, storage: int) -> int:
        """A segment that computes it again."""
        way = self._find_way(storage)
        assert way is not None
        ticks = tuple(self._trace.ops[index].tick for index in way.ops)
        self._segments.append(Segment(ops=ticks, outputs=(storage,), leaves=way.leaves))
        self._segment_ways.append(way)
        return len(self._segments) - 1

    def _find_way(self, storage: int) -> Way | None:
        way = self._ways.get(storage)
        if way is None or not self._back.is_open(way):
            way = self._ways[storage] = self._back.find(storage)
        return way
