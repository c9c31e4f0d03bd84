"""Simulates a step under a plan: the residency machine on a virtual clock.

A storage counts from its creation until its last holder releases it. Holders are the program, the running backward
node, and autograd's claim, which a plan can interrupt:

    program   |=========|
    claim            |======|   (away)    |========|
    node                                       |===|
    counted   |=============|             |========|

The model's state moves at ops (`ir.state`), in a step like the ones before: storages that are away when the step ends
are away when it begins, and transfers that the step before has left under way go on.

Durations never change the bytes held, since a release waits for its transfer. So the memory of a plan is exact, and
only its seconds are a forecast. The tier of a copy affects seconds only, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import TraceError
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Wait
from elbowroom.ir.buffers import Buffer
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import Event, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.lifetimes import cut
from elbowroom.ir.placement import Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.state import StateMove, list_away, list_moves
from elbowroom.ir.trace import Trace
from elbowroom.layout.copies import lay_out_copies
from elbowroom.layout.lay_out import lay_out
from elbowroom.replays.footprint import Footprints
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.admission import admit
from elbowroom.simulator.allocator_model import Allocator, Rerun, Stay, list_blocks, reserve
from elbowroom.simulator.driver import VirtualDevice
from elbowroom.simulator.followed_step import FollowedStep
from elbowroom.simulator.host_overflow import Overflow, find_overflow
from elbowroom.simulator.state_moves import merge_moves, move_state

Spans = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class StateCopies:
    """Copies of the model's state under a plan.

    Attributes:
        on_disk: storages whose copies are on the disk behind the host.
        exposed_seconds: seconds by which the moves of each storage lengthen a step.
    """

    on_disk: frozenset[int]
    exposed_seconds: Mapping[int, float]


class PreparedTrace:
    """Data of a trace that do not depend on the plan, prepared once for many forecasts.

    Args:
        host_bytes: as for `simulate.simulate`.

    Attributes:
        host_bytes: as given.
        begins, begin_list: begin of each entry in the plain step.
        rounded: bytes of each storage, rounded up as by the device's allocator.
        events: saves, needs and ends of claims, in order.
        footprints: costs of replays.
        node_spans: spans during which a backward node holds each saved storage.
        overflow: treatment of copies that do not fit the tier below; None if it is unlimited.

    Raises:
        TraceError: the costs belong to another trace, or are invalid (`simulator.admission`).
    """

    def __init__(self, trace: Trace, costs: Costs, *, host_bytes: int | None = None) -> None:
        admit(trace, costs)
        self.trace, self.costs = trace, costs
        self.host_bytes = host_bytes
        self.overflow = find_overflow(costs, host_bytes)
        self.rounded = round_up([storage.nbytes for storage in trace.storages], costs.alignment_bytes)
        self.events = list_events(trace)
        self._sizes = [storage.nbytes for storage in trace.storages]
        self._rounded_list: list[int] = self.rounded.tolist()
        self.footprints = Footprints(trace, costs, self._rounded_list)
        seconds = np.zeros(trace.end + 1)
        seconds[[op.tick for op in trace.ops]] = costs.op_seconds
        hook_ticks = [save.tick for save in trace.saves] + [need.tick for need in trace.needs]
        seconds[hook_ticks] += costs.hook_seconds
        self.begins = np.concatenate(([0.0], np.cumsum(seconds)))
        self.begin_list: list[float] = self.begins.tolist()
        self._workspace = np.zeros(trace.end, dtype=np.int64)
        self._workspace[[op.tick for op in trace.ops]] = costs.workspace_bytes
        saved = {save.storage for save in trace.saves}
        self.node_spans: dict[int, Spans] = {storage: [] for storage in saved}
        for need in trace.needs:
            self.node_spans[trace.saves[need.save].storage].append((need.tick, need.released))
        change = np.zeros(trace.end + 1, dtype=np.int64)
        for storage in trace.storages:
            if storage.id not in saved:
                _add_span(change, storage.created, storage.released, self.rounded[storage.id])
        self._unsaved = change
        self._claims = trace.claims

    def run(
        self, plan: Plan, *, allocator: Allocator = Allocator.EXACT, placement: Placement | None = None
    ) -> Forecast:
        """Forecast the step under a plan; for the arguments see `simulate.simulate`."""
        run = self._begin(plan)
        if allocator is Allocator.PLANNED and placement is None:
            placement = lay_out_copies(run.device.copy_slots, self.trace.end)
        figures: dict[str, Any] = {}
        if placement is not None:
            state_host_bytes, state_disk_bytes = run.device.count_state_copies()
            figures |= {
                "lower_arena_bytes": placement.lower_bytes + state_host_bytes,
                "disk_arena_bytes": placement.disk_bytes + state_disk_bytes,
            }
        if allocator is not Allocator.EXACT:
            figures |= self.list_reserved(run.list_stays(), run.reruns)
        if allocator is Allocator.PLANNED:
            figures["arena_bytes"] = lay_out(self.list_blocks(plan)).arena_bytes
        return dataclasses.replace(run.finish(), **figures)

    def run_with_waits(self, plan: Plan) -> tuple[Forecast, dict[tuple[int, int], float]]:
        """Return the forecast of a plan, and the seconds of each wait for a transfer, by entry and storage."""
        run = self._begin(plan)
        return run.finish(), run.device.waits

    def follow(self, plan: Plan) -> FollowedStep:
        """Forecast the step under a plan in detail.

        Raises:
            TraceError: the plan is for another trace.
        """
        run = self._begin(plan)
        return FollowedStep(
            forecast=run.finish(),
            activities=tuple(run.device.activities),
            entry_seconds=self._list_begins(run.device.delays, overhead_seconds=0.0),
            stays=tuple(run.list_stays()),
            reruns=tuple(run.reruns),
        )

    def list_blocks(self, plan: Plan) -> tuple[Buffer, ...]:
        """Return the blocks on the device under a plan as buffers: reloads, intermediates of replays, and workspaces
        included. Time counts requests.

        Raises:
            TraceError: the plan is for another trace.
        """
        run = self._begin(plan)
        return list_blocks(self.trace, self.costs, run.list_stays(), run.reruns)

    def place(self, plan: Plan) -> Placement:
        """Return the placement of the copies that a plan makes.

        Raises:
            TraceError: the plan is for another trace.
        """
        placement = lay_out_copies(self._begin(plan).device.copy_slots, self.trace.end)
        overflow = self.find_overflow(plan)
        return dataclasses.replace(placement, piece_bytes=None if overflow is None else overflow.piece_bytes)

    def find_overflow(self, plan: Plan) -> Overflow | None:
        """Return the overflow for a plan's copies: `overflow`, or that of the smaller host that the plan uses."""
        if plan.host_bytes is None:
            return self.overflow
        if self.host_bytes is not None and (self.overflow is None or self.host_bytes <= plan.host_bytes):
            return self.overflow
        return find_overflow(self.costs, max(plan.host_bytes, count_least_host_bytes()))

    def follow_state(self, plan: Plan) -> StateCopies:
        """Return where the copies of the model's state are under a plan, and what its moves cost in each step.

        Raises:
            TraceError: the plan is for another trace.
        """
        device = self._begin(plan).device
        return StateCopies(on_disk=device.list_state_on_disk(), exposed_seconds=device.exposed_seconds)

    def make_device(self, overflow: Overflow | None) -> VirtualDevice:
        """Return the device on which one step is simulated."""
        return VirtualDevice(self.costs, self._sizes, self._rounded_list, overflow)

    def summarize(
        self, device: VirtualDevice, live_bytes: npt.NDArray[np.int64], *, evictions: int, replays: int
    ) -> Forecast:
        """Return the forecast of a step that a device has carried out.

        Args:
            live_bytes: peak bytes on the device during each entry.
        """
        peak_tick = int(np.argmax(live_bytes)) if len(live_bytes) else 0
        return Forecast(
            peak_bytes=int(live_bytes[peak_tick]) if len(live_bytes) else 0,
            peak_tick=peak_tick,
            live_bytes=tuple(live_bytes.tolist()),
            begin_seconds=self._list_begins(device.delays, self.costs.overhead_seconds),
            step_seconds=self.begin_list[-1] + device.late + self.costs.overhead_seconds,
            compute_seconds=float(sum(self.costs.op_seconds)),
            evictions=evictions,
            replays=replays,
            **device.list_figures(),
        )

    def list_reserved(self, stays: Sequence[Stay], reruns: Sequence[Rerun]) -> dict[str, Any]:
        """Return the fields of a Forecast about PyTorch's allocator."""
        found = reserve(self.trace, self.costs, stays, reruns)
        return {"reserved_bytes": found.reserved_bytes, "fragmented_bytes": found.fragmented_bytes}

    def _list_begins(self, delays: Mapping[int, float], overhead_seconds: float) -> tuple[float, ...]:
        """Return the begin of each entry; a delay is part of the entry that causes it."""
        plain = self.begins[: self.trace.end + 1]
        shares = plain / plain[-1] if plain[-1] else np.linspace(0.0, 1.0, len(plain))
        late = np.zeros(len(plain))
        ends = [min(tick + 1, len(plain) - 1) for tick in delays]
        np.add.at(late, np.array(ends, dtype=np.intp), list(delays.values()))
        return tuple((plain + overhead_seconds * shares + np.cumsum(late)).tolist())

    def _begin(self, plan: Plan) -> _PlannedRun:
        if plan.trace_digest != self.costs.trace_digest:
            raise TraceError(f"the plan is for trace {plan.trace_digest[:12]}, not {self.costs.trace_digest[:12]}")
        moved = {decision.storage for decision in plan.decisions}
        moved |= {leaf for segment in plan.segments for leaf in segment.leaves if leaf in self._claims}
        events = [event for event in self.events if not isinstance(event, StorageFreed) or event.storage in moved]
        return _PlannedRun(self, plan, events)


class _PlannedRun:
    """Simulation of one step under a plan."""

    def __init__(self, prepared: PreparedTrace, plan: Plan, events: list[Event]) -> None:
        self.prepared, self.plan = prepared, plan
        self.device = prepared.make_device(prepared.find_overflow(plan))
        self._state = frozenset(decision.storage for decision in plan.state)
        self._away = list_away(prepared.trace, plan)
        timeline = merge_moves(events, list_moves(prepared.trace, plan))
        if plan.state:
            self.device.keep_copies(sorted(self._state))
            self._carry_out(timeline)  # the step before
            self.device.begin_next_step(prepared.begin_list[-1] + self.device.late + prepared.costs.overhead_seconds)
        self._carry_out(timeline)

    def _carry_out(self, timeline: Sequence[Event | StateMove]) -> None:
        """Carry out one step."""
        self.held_since = dict[int, int]()
        self.claims: dict[int, Spans] = {}
        self.doubles: list[tuple[int, int, int]] = []
        self.spikes: dict[int, int] = {}
        self.reruns: list[Rerun] = []
        self.evictions = 0
        begins, moves = self.prepared.begin_list, plan_policy.list_moves(self.plan)
        machine = Machine(plan_policy.Policy(moves), self.plan.segments)
        for event in timeline:
            self.device.entry, self.device.begin = event.tick, begins[event.tick]
            if isinstance(event, StateMove):
                self.device.begin = begins[event.tick + (not event.kind.is_before)]
                move_state(self.device, event)
                continue
            if isinstance(event, StorageSaved):
                self.held_since.setdefault(event.storage, event.tick)
            for action in machine.feed(event):
                self.perform(action, event)
            if isinstance(event, StorageFreed):
                self.device.discard_copy(event.storage)

    def perform(self, action: Action, event: Event) -> None:
        """Carry out one action, and record the spans during which storages are on the device."""
        tick = event.tick
        if isinstance(action, Recompute):
            segment = self.plan.segments[action.segment]
            for leaf in self._state.intersection(segment.leaves):
                self.device.wait(leaf)
            footprint = self.prepared.footprints.measure(segment, action.outputs)
            self.device.replay(footprint.seconds)
            self.spikes[tick] = max(self.spikes.get(tick, 0), footprint.extra_bytes)
            self.reruns.append(Rerun(tick=tick, segment=segment, outputs=action.outputs))
            for output in action.outputs:
                self.bring_back(output, tick)
        elif isinstance(action, Wait):
            self.device.wait(action.storage)
        elif isinstance(action, Release):
            # A release when the claim ends frees before the entry; any other one after it.
            is_over = isinstance(event, StorageFreed)
            self.evictions += not is_over
            begin = self.held_since.pop(action.storage)
            self.claims.setdefault(action.storage, []).append((begin, tick if is_over else tick + 1))
        elif isinstance(action, Offload):
            self.device.offload(action.storage)
        else:
            self.bring_back(action.storage, tick)
            self.device.reload(action.storage)

    def bring_back(self, storage: int, tick: int) -> None:
        """Record a new block; while the program still holds the old one, both count."""
        self.held_since[storage] = tick
        released = self.prepared.trace.storages[storage].released
        if tick < released:
            self.doubles.append((storage, tick, released))

    def finish(self) -> Forecast:
        """Return the forecast of the step."""
        return self.prepared.summarize(self.device, self._count(), evictions=self.evictions, replays=len(self.reruns))

    def list_spans(self, storage: int) -> Spans:
        """Return the spans of a saved storage on the device, except blocks that return beside the old one."""
        home = self.prepared.trace.storages[storage]
        claims, spans = self.prepared._claims[storage], self.claims.get(storage)
        if spans is None:
            spans = list(claims)  # it never leaves
        elif storage in self.held_since:
            spans = [*spans, (self.held_since[storage], claims[-1][1])]
        joined = _join([(home.created, home.released), *spans, *self.prepared.node_spans[storage]])
        return cut(joined, self._away.get(storage, ()))

    def list_stays(self) -> list[Stay]:
        """Return every block of the step except those inside ops and replays."""
        stays = [Stay(storage=storage, begin=begin, end=end) for storage, begin, end in self.doubles]
        for home in self.prepared.trace.storages:
            saved = home.id in self.prepared._claims
            spans = self.list_spans(home.id) if saved else [(home.created, home.released)]
            for begin, end in spans if saved else cut(spans, self._away.get(home.id, ())):
                stays.append(Stay(storage=home.id, begin=begin, end=end))
        return stays

    def _count(self) -> npt.NDArray[np.int64]:
        prepared = self.prepared
        change = prepared._unsaved.copy()
        for storage in prepared._claims:
            for begin, end in self.list_spans(storage):
                _add_span(change, begin, end, prepared.rounded[storage])
        for storage, away in self._away.items():
            for begin, end in away if storage not in prepared._claims else ():
                _add_span(change, begin, end, -prepared.rounded[storage])
        for storage, begin, end in self.doubles:
            _add_span(change, begin, end, prepared.rounded[storage])
        live = np.cumsum(change[:-1])
        for tick, extra in self.spikes.items():
            live[tick] += extra
        return live + prepared._workspace


def list_events(trace: Trace) -> list[Event]:
    """Return saves, needs and ends of claims, in order; a claim that ends at tick t ends before entry t."""
    events: list[tuple[int, int, Event]] = []
    for save in trace.saves:
        events.append((save.tick, 1, StorageSaved(save.storage, save.tick)))
    for need in trace.needs:
        events.append((need.tick, 1, StorageNeeded(trace.saves[need.save].storage, need.tick)))
    for storage, claims in trace.claims.items():
        for _, end in claims:
            events.append((end, 0, StorageFreed(storage, end)))
    events.sort(key=lambda item: item[:2])
    return [event for _, _, event in events]


def round_up(sizes: list[int], alignment_bytes: int) -> npt.NDArray[np.int64]:
    """Return sizes rounded up as by the device's allocator."""
    array = np.asarray(sizes, dtype=np.int64)
    return -(-array // alignment_bytes) * alignment_bytes


def _join(spans: Spans) -> Spans:
    """Return the union of spans, in order, without overlaps."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def _add_span(change: npt.NDArray[np.int64], begin: int, end: int, nbytes: int) -> None:
    if end > begin:
        change[max(begin, 0)] += nbytes
        change[min(max(end, 0), len(change) - 1)] -= nbytes
