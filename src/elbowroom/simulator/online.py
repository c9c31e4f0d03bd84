"""Simulates a step under an online policy, without a plan, on a virtual clock.

Room is made before each op, reload and replay, as in the runtime; storages that the program or a running node holds
stay. Bytes are as exact as the trace; seconds come from the costs, with one lane per direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from elbowroom._family import get
from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.errors import Infeasible, UsageError
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload, Wait
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import Event, PressureRaised, StorageFreed, StorageNeeded
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.trace import Op, Trace
from elbowroom.layout.caching import CachingAllocator
from elbowroom.residency import policies
from elbowroom.residency.access_history import AccessHistory
from elbowroom.residency.machine import Machine, State, count_reads
from elbowroom.simulator.allocator_model import Allocator, Rerun
from elbowroom.simulator.driver import VirtualDevice
from elbowroom.simulator.live_memory import LiveMemory
from elbowroom.simulator.planned import PreparedTrace
from elbowroom.simulator.recompute_paths import Path, RecomputePaths

MIN_BYTES = 1 << 14
"""Smaller storages never leave, as at run time."""


def simulate_policy(
    trace: Trace,
    costs: Costs,
    budget_bytes: int,
    *,
    policy: str = "delta",
    min_bytes: int = MIN_BYTES,
    most_seconds: float = math.inf,
    history: AccessHistory | None = None,
    host_bytes: int | None = None,
    allocator: Allocator = Allocator.EXACT,
) -> Forecast:
    """Forecast one step of `trace` within a budget, under a policy that decides during the step.

    Args:
        policy: name of a module of `residency.policies`.
        min_bytes: smaller storages never leave.
        most_seconds: limit on the time of the step.
        history: history of earlier steps; this step is added.
        host_bytes: capacity of the tier below; further copies go to the disk, if the costs have a link to one. None for
            unlimited.
        allocator: CACHING also models the memory that PyTorch's allocator reserves.

    Raises:
        UsageError: `allocator` is PLANNED, but addresses can only be planned for a planned step.
        Infeasible: an op, a reload or a replay finds no room, or the time limit is exceeded; names it.
        UnknownMember: there is no such policy.
        TraceError: the costs belong to another trace, or a link has no bandwidth.
    """
    if allocator is Allocator.PLANNED:
        raise UsageError("planned addresses need a plan: a policy's evictions are not known ahead")
    prepared = PreparedTrace(trace, costs, host_bytes=host_bytes)
    movable = frozenset(storage for storage in trace.movable if trace.storages[storage].nbytes >= min_bytes)
    run = _OnlineRun(prepared, budget_bytes, most_seconds, movable, policy, history or AccessHistory())
    forecast = run.finish()
    if allocator is Allocator.EXACT:
        return forecast
    return dataclasses.replace(forecast, **prepared.list_reserved(run.memory.list_stays(), run.reruns))


class _StepContext:
    """State of a simulated step so far (`residency.context.PolicyContext`)."""

    def __init__(
        self,
        prepared: PreparedTrace,
        budget_bytes: int,
        movable: frozenset[int],
        device: VirtualDevice,
        memory: LiveMemory,
        paths: RecomputePaths,
    ) -> None:
        self._costs, self._movable = prepared.costs, movable
        self._sizes = [home.nbytes for home in prepared.trace.storages]
        self._rounded: list[int] = prepared.rounded.tolist()
        self._device = device
        self._memory = memory
        self._paths = paths
        self.budget_bytes = budget_bytes
        self.machine: Machine | None = None  # set later, since its policy needs this context
        self.pinned: list[Counter[int]] = []  # storages that pending actions read, one count for each list of actions
        self.op_seconds = 0.0

    def now(self) -> float:
        return self._device.now

    def busy_seconds(self) -> float:
        return self.op_seconds

    def live_bytes(self) -> int:
        return self._memory.live_bytes

    def take_recent_peak(self) -> int:
        return self._memory.take_recent_peak()

    def nbytes(self, storage: int) -> int:
        return self._rounded[storage]

    def address(self, storage: int) -> int | None:
        return self._memory.addresses.get(storage)

    def state(self, storage: int) -> State | None:
        return None if self.machine is None else self.machine.state(storage)

    def move_seconds(self, nbytes: int) -> tuple[float, float]:
        return offload_seconds(self._costs.link, nbytes), reload_seconds(self._costs.link, nbytes)

    def copy_out_seconds(self, storage: int) -> float:
        return 0.0 if self._device.has_copy(storage) else offload_seconds(self._costs.link, self._sizes[storage])

    def find_path(self, storage: int) -> Path | None:
        return self._paths.find(storage)

    def may_drop(self, storage: int) -> bool:
        return True

    def may_move(self, storage: int) -> bool:
        return storage in self._movable

    def may_leave(self, storage: int) -> bool:
        if not self._memory.is_claimed_alone(storage):
            return False
        return not any(counter[storage] > 0 for counter in self.pinned)

    def add_segment(self, storage: int) -> int:
        return self._paths.add_segment(storage)


class _OnlineRun:
    """Simulation of one step: feeds the machine, and makes room."""

    def __init__(
        self,
        prepared: PreparedTrace,
        budget_bytes: int,
        most_seconds: float,
        movable: frozenset[int],
        policy: str,
        history: AccessHistory,
    ) -> None:
        self._prepared, self._trace = prepared, prepared.trace
        self._budget_bytes, self._most_seconds = budget_bytes, most_seconds
        self._rounded: list[int] = prepared.rounded.tolist()
        chosen = get(policies, policy, "Policy")
        self._device = prepared.make_device(prepared.overflow)
        self.memory = LiveMemory(self._rounded, CachingAllocator() if chosen.uses_addresses else None)
        self._paths = RecomputePaths(prepared.trace, prepared.footprints)
        self._context = _StepContext(prepared, budget_bytes, movable, self._device, self.memory, self._paths)
        self._machine = self._context.machine = Machine(chosen(self._context, history), self._paths.segments)
        self._evictions = 0
        self.reruns: list[Rerun] = []

    def finish(self) -> Forecast:
        """Run the step to its end."""
        trace, costs = self._trace, self._prepared.costs
        events: dict[int, list[Event]] = {}
        for event in self._prepared.events:
            events.setdefault(event.tick, []).append(event)
        ends: dict[int, list[int]] = {}
        for home in trace.storages:
            if home.created < 0:
                self.memory.hold(home.id)
            ends.setdefault(home.released, []).append(home.id)
        for storage, spans in self._prepared.node_spans.items():
            for _, released in spans:
                ends.setdefault(released, []).append(storage)
        ops = {op.tick: (op, index) for index, op in enumerate(trace.ops)}
        live_bytes = np.zeros(trace.end, dtype=np.int64)
        for tick in range(trace.end):
            self._begin_entry(tick, events.get(tick, ()))
            for storage in ends.get(tick, ()):
                self.memory.let_go(storage)
            self.memory.measure_entry()
            if tick in ops:
                op, index = ops[tick]
                self._run(op, costs.op_seconds[index], costs.workspace_bytes[index])
            for event in events.get(tick, ()):
                if not isinstance(event, StorageFreed):
                    self._save_or_need(event)
            live_bytes[tick] = self.memory.entry_peak
        self._begin_entry(trace.end, events.get(trace.end, ()))
        return self._prepared.summarize(self._device, live_bytes, evictions=self._evictions, replays=len(self.reruns))

    def _begin_entry(self, tick: int, events: Sequence[Event]) -> None:
        """Begin an entry, and free what autograd lets go of before it."""
        self._device.entry, self._device.begin = tick, self._prepared.begin_list[tick]
        self.memory.begin_entry(tick)
        for event in events:
            if isinstance(event, StorageFreed):
                self._free(event)

    def _run(self, op: Op, seconds: float, workspace_bytes: int) -> None:
        made = {view.storage for view in op.writes if self._trace.storages[view.storage].created == op.tick}
        nbytes = sum(self._rounded[storage] for storage in made) + workspace_bytes
        self.memory.note_request(nbytes)
        self._make_room(nbytes, op.name)
        for storage in sorted(made):
            self.memory.hold(storage)
        self.memory.note(workspace_bytes)
        self._context.op_seconds += seconds
        self._paths.executed.add(op)
        self._check_time()

    def _save_or_need(self, event: Event) -> None:
        storage, claimed = event.storage, self._paths.executed.claimed
        self._device.begin = self._prepared.begin_list[event.tick + 1]  # the hook has run
        is_need = isinstance(event, StorageNeeded)
        if not is_need and storage not in claimed:
            claimed.add(storage)
            self.memory.claim(storage)
        self._carry_out(self._machine.feed(event))
        if is_need:
            self.memory.hold(storage)

    def _free(self, event: StorageFreed) -> None:
        for action in self._machine.feed(event):
            if isinstance(action, Wait):
                self._device.wait(action.storage)
        self._paths.forget(event.storage)
        self._device.discard_copy(event.storage)
        self.memory.unclaim(event.storage)

    def _check_time(self) -> None:
        if self._device.now > self._most_seconds:
            raise Infeasible(
                needed_bytes=self._budget_bytes + 1,
                budget_bytes=self._budget_bytes,
                op="a step that takes too long",
                is_whole_step=False,
            )

    def _make_room(self, nbytes: int, what: str) -> None:
        while (missing := self.memory.live_bytes + nbytes - self._budget_bytes) > 0:
            actions = self._machine.feed(PressureRaised(missing, 0))
            if not actions:
                raise Infeasible(
                    needed_bytes=self._budget_bytes + missing,
                    budget_bytes=self._budget_bytes,
                    op=what,
                    is_whole_step=False,
                )
            self._carry_out(actions)

    def _carry_out(self, actions: Sequence[Action]) -> None:
        self._context.pinned.append(count_reads(actions, self._paths.segments))
        try:
            for action in actions:
                self._perform(action)
                self._check_time()
        finally:
            self._context.pinned.pop()

    def _perform(self, action: Action) -> None:
        if isinstance(action, Recompute):
            self._replay(action)
        elif isinstance(action, Offload):
            self._device.offload(action.storage)
        elif isinstance(action, Reload):
            if not self.memory.is_here(action.storage):
                nbytes = self._rounded[action.storage]
                self._make_room(nbytes, f"a reload of {nbytes} bytes")
                self._device.reload(action.storage)
            self.memory.claim(action.storage)
        elif isinstance(action, Release):
            self._evictions += self.memory.unclaim(action.storage)
        else:
            self._device.wait(action.storage)

    def _replay(self, action: Recompute) -> None:
        path = self._paths.path_of(action.segment)
        self._make_room(path.nbytes, f"a replay of {len(path.ops)} ops")
        self.memory.note(path.nbytes)
        segment = self._paths.segments[action.segment]
        self.reruns.append(Rerun(tick=self._device.entry, segment=segment, outputs=action.outputs))
        self._device.replay(path.seconds)
        for output in action.outputs:
            self.memory.claim(output)
        for leaf in path.leaves:
            self._context.pinned[-1][leaf.id] -= 1
