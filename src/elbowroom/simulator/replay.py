"""Replays a trace under a plan: the residency machine on a virtual clock.

A storage counts from its creation until its last holder lets go. Holders are the program, the running backward node,
and autograd's claim, which is ours to interrupt:

    program   |=========|
    claim            |======|   (away)    |========|
    node                                       |===|
    counted   |=============|             |========|

How long anything takes never changes how many bytes are held: a release waits for its transfer. So the memory of a
plan is exact arithmetic, and only the seconds are a forecast. Where copies are kept below changes seconds alone, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from elbowroom.errors import TraceError, UnknownMember
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Wait
from elbowroom.ir.buffers import Buffer
from elbowroom.ir.costs import Costs
from elbowroom.ir.events import Event, StorageFreed, StorageNeeded, StorageSaved
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.layout.copies import lay_out_copies
from elbowroom.layout.lay_out import lay_out
from elbowroom.residency import plan_policy
from elbowroom.residency.machine import Machine
from elbowroom.simulator.addresses import Allocator, Rerun, Stay, list_blocks, reserve
from elbowroom.simulator.admission import admit
from elbowroom.simulator.lanes import Lanes
from elbowroom.simulator.overflow import Overflow, find_overflow
from elbowroom.simulator.transients import Transients

Spans = list[tuple[int, int]]


def simulate(
    trace: Trace,
    costs: Costs,
    plan: Plan,
    *,
    host_bytes: int | None = None,
    allocator: Allocator | str = Allocator.EXACT,
    placement: Placement | None = None,
) -> Forecast:
    """Forecast one step of `trace` under `plan`.

    Args:
        host_bytes: what the tier below may hold before copies go on to the disk behind it, where the costs have a
            link to one; None for any amount.
        allocator: "caching" to know besides what PyTorch's allocator would take from the device (`layout.caching`);
            "planned" for that, and the arenas that blocks and copies take if they are laid out.
        placement: of the plan's copies, where it is known; made for "planned" where not.

    Raises:
        TraceError: costs or plan belong to another trace, or a link moves nothing.
        UnknownMember: there is no such allocator.
    """
    if allocator not in list(Allocator):
        raise UnknownMember("allocator", str(allocator), tuple(Allocator))
    return Replay(trace, costs, host_bytes=host_bytes).run(plan, allocator=Allocator(allocator), placement=placement)


class Replay:
    """Everything about a trace that no plan changes, prepared once for many forecasts.

    Args:
        host_bytes: as for `simulate`.

    Attributes:
        overflow: what becomes of copies that the tier below has no room for; None if it has room for any.

    Raises:
        TraceError: the costs belong to another trace, or are no figures to reckon with (`simulator.admission`).
    """

    def __init__(self, trace: Trace, costs: Costs, *, host_bytes: int | None = None) -> None:
        admit(trace, costs)
        self.trace, self.costs = trace, costs
        self._host_bytes = host_bytes
        self.overflow = find_overflow(costs, host_bytes)
        self.rounded = round_up([storage.nbytes for storage in trace.storages], costs.alignment_bytes)
        self.events = list_events(trace)
        self.transients = Transients(trace, costs, self.rounded)
        seconds = np.zeros(trace.end + 1)
        seconds[[op.tick for op in trace.ops]] = costs.op_seconds
        hook_ticks = [save.tick for save in trace.saves] + [need.tick for need in trace.needs]
        seconds[hook_ticks] += costs.hook_seconds
        self.begins = np.concatenate(([0.0], np.cumsum(seconds)))  # plain start time of each entry
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
        """Forecast the step under a plan; for the arguments see `simulate`."""
        run = self._begin(plan)
        if allocator is Allocator.PLANNED and placement is None:
            placement = lay_out_copies(run.copy_slots, self.trace.end)
        figures: dict[str, Any] = {}
        if placement is not None:
            figures |= {"lower_arena_bytes": placement.lower_bytes, "disk_arena_bytes": placement.disk_bytes}
        if allocator is not Allocator.EXACT:
            found = reserve(self.trace, self.costs, run.list_stays(), run.reruns)
            figures |= {"reserved_bytes": found.reserved_bytes, "fragmented_bytes": found.fragmented_bytes}
        if allocator is Allocator.PLANNED:
            figures["arena_bytes"] = lay_out(self.list_blocks(plan)).arena_bytes
        return dataclasses.replace(run.finish(), **figures)

    def list_blocks(self, plan: Plan) -> tuple[Buffer, ...]:
        """The blocks on the device under a plan, as what wants an offset: what comes back, what replays make on their
        way, and workspaces included. Time counts requests.

        Raises:
            TraceError: the plan is for another trace.
        """
        run = self._begin(plan)
        return list_blocks(self.trace, self.costs, run.list_stays(), run.reruns)

    def place(self, plan: Plan) -> Placement:
        """Where the copies lie that a plan has made.

        Raises:
            TraceError: the plan is for another trace.
        """
        placement = lay_out_copies(self._begin(plan).copy_slots, self.trace.end)
        overflow = self.find_overflow(plan)
        return dataclasses.replace(placement, piece_bytes=None if overflow is None else overflow.piece_bytes)

    def find_overflow(self, plan: Plan) -> Overflow | None:
        """Find what becomes of a plan's copies: `overflow`, or that of the smaller host that the plan keeps to."""
        if plan.host_bytes is None or (self._host_bytes is not None and self._host_bytes <= plan.host_bytes):
            return self.overflow
        return find_overflow(self.costs, plan.host_bytes)

    def _begin(self, plan: Plan) -> _Run:
        if plan.trace_digest != self.costs.trace_digest:
            raise TraceError(f"the plan is for trace {plan.trace_digest[:12]}, not {self.costs.trace_digest[:12]}")
        moved = {decision.storage for decision in plan.decisions}
        moved |= {leaf for segment in plan.segments for leaf in segment.leaves if leaf in self._claims}
        machine = Machine(plan_policy.Policy(plan), plan.segments)
        events = [event for event in self.events if not isinstance(event, StorageFreed) or event.storage in moved]
        return _Run(self, plan, machine, events)


class _Run:
    """One pass over the events."""

    def __init__(self, replay: Replay, plan: Plan, machine: Machine, events: list[Event]) -> None:
        self.replay, self.plan = replay, plan
        self.overflow = replay.find_overflow(plan)
        self.lanes = Lanes(replay.costs.link)
        self.late = 0.0  # seconds behind the plain step
        self.delays: dict[int, float] = {}  # of them, by entry, what came with its event
        self.done: dict[int, float] = {}
        self.held_since = dict[int, int]()
        self.claims: dict[int, Spans] = {}
        self.doubles: list[tuple[int, int, int]] = []
        self.spikes: dict[int, int] = {}
        self.reruns: list[Rerun] = []
        self.in_lower = self.lower_peak = self.on_disk = self.disk_peak = 0
        self.below: dict[int, CopySlot] = {}
        self.copy_slots: list[CopySlot] = []
        self.recompute_seconds = self.stall_seconds = 0.0
        self.offloaded_bytes = self.reloaded_bytes = 0
        for event in events:
            if isinstance(event, StorageSaved):
                self.held_since.setdefault(event.storage, event.tick)
            before = self.late
            for action in machine.feed(event):
                self.perform(action, event)
            if self.late > before:
                self.delays[event.tick] = self.delays.get(event.tick, 0.0) + self.late - before
            if isinstance(event, StorageFreed):
                self.forget(event.storage, event.tick)

    def perform(self, action: Action, event: Event) -> None:
        replay, tick = self.replay, event.tick
        now = float(replay.begins[tick]) + self.late
        if isinstance(action, Recompute):
            segment = self.plan.segments[action.segment]
            seconds, extra = replay.transients.measure(segment, action.outputs)
            self.late += seconds
            self.recompute_seconds += seconds
            self.spikes[tick] = max(self.spikes.get(tick, 0), extra)
            self.reruns.append(Rerun(tick=tick, segment=segment, outputs=action.outputs))
            for output in action.outputs:
                self.held_since[output] = tick
                self.note_double(output, tick)
            return
        storage = action.storage
        nbytes = replay.trace.storages[storage].nbytes
        if isinstance(action, Wait):
            self.wait(max(0.0, self.done.get(storage, 0.0) - now))
        elif isinstance(action, Release):
            # A release when the claim ends frees before the entry; any other one after it.
            end = tick if isinstance(event, StorageFreed) else tick + 1
            self.claims.setdefault(storage, []).append((self.held_since.pop(storage), end))
        elif isinstance(action, Offload):
            self.offloaded_bytes += nbytes
            self.send(storage, nbytes, tick)
        else:
            self.held_since[storage] = tick
            self.note_double(storage, tick)
            self.reloaded_bytes += nbytes
            self.fetch(storage, nbytes, now)

    def wait(self, seconds: float) -> None:
        """The program stands still."""
        self.late += seconds
        self.stall_seconds += seconds

    def send(self, storage: int, nbytes: int, tick: int) -> None:
        """Begin a copy to the tier below; where that is full, make one on the disk."""
        rounded, overflow = int(self.replay.rounded[storage]), self.overflow
        now = float(self.replay.begins[tick]) + self.late
        is_full = overflow is not None and self.in_lower + rounded > overflow.host_room_bytes
        self.below[storage] = CopySlot(storage=storage, begin=tick, end=tick, nbytes=nbytes, is_on_disk=is_full)
        if overflow is not None and is_full:
            self.done[storage] = self.lanes.send_through(overflow.disk, overflow.piece_bytes, nbytes, now)
            self.wait(self.done[storage] - now)
            self.on_disk += rounded
            self.disk_peak = max(self.disk_peak, self.on_disk)
            return
        self.done[storage] = self.lanes.send(nbytes, now)
        self.late += nbytes * self.replay.costs.link.drag_seconds_per_byte
        self.in_lower += rounded
        self.lower_peak = max(self.lower_peak, self.in_lower)

    def fetch(self, storage: int, nbytes: int, now: float) -> None:
        """Begin a copy back, from wherever it is."""
        overflow = self.overflow
        if overflow is not None and self.below[storage].is_on_disk:
            read, self.done[storage] = self.lanes.fetch_through(overflow.disk, overflow.piece_bytes, nbytes, now)
            self.wait(read - now)
            return
        self.done[storage] = self.lanes.fetch(nbytes, now)
        self.late += nbytes * self.replay.costs.link.drag_seconds_per_byte

    def forget(self, storage: int, tick: int) -> None:
        """Its claim has ended, and its copy goes."""
        copy = self.below.pop(storage, None)
        if copy is None:
            return
        self.copy_slots.append(dataclasses.replace(copy, end=tick))
        if copy.is_on_disk:
            self.on_disk -= int(self.replay.rounded[storage])
        else:
            self.in_lower -= int(self.replay.rounded[storage])

    def note_double(self, storage: int, tick: int) -> None:
        """What comes back is a new block: while the program still holds the old one, both count."""
        released = self.replay.trace.storages[storage].released
        if tick < released:
            self.doubles.append((storage, tick, released))

    def finish(self) -> Forecast:
        replay = self.replay
        live = self._count()
        peak_tick = int(np.argmax(live)) if len(live) else 0
        compute = float(sum(replay.costs.op_seconds))
        return Forecast(
            peak_bytes=int(live[peak_tick]) if len(live) else 0,
            peak_tick=peak_tick,
            live_bytes=tuple(live.tolist()),
            begin_seconds=self._list_begins(),
            step_seconds=float(replay.begins[-1]) + self.late + replay.costs.overhead_seconds,
            compute_seconds=compute,
            recompute_seconds=self.recompute_seconds,
            stall_seconds=self.stall_seconds,
            offloaded_bytes=self.offloaded_bytes,
            reloaded_bytes=self.reloaded_bytes,
            lower_tier_bytes=self.lower_peak,
            disk_bytes=self.disk_peak,
        )

    def _list_begins(self) -> tuple[float, ...]:
        """When each entry begins; a delay is part of the entry at which it comes about."""
        plain, overhead = self.replay.begins[: self.replay.trace.end + 1], self.replay.costs.overhead_seconds
        shares = plain / plain[-1] if plain[-1] else np.linspace(0.0, 1.0, len(plain))
        delays = np.zeros(len(plain))
        ends = [min(tick + 1, len(plain) - 1) for tick in self.delays]
        np.add.at(delays, np.array(ends, dtype=np.intp), list(self.delays.values()))
        return tuple((plain + overhead * shares + np.cumsum(delays)).tolist())

    def list_spans(self, storage: int) -> Spans:
        """When a saved storage is on the device, without what comes back beside its old block."""
        replay, home = self.replay, self.replay.trace.storages[storage]
        claims, spans = replay._claims[storage], self.claims.get(storage)
        if spans is None:
            spans = list(claims)  # it never leaves
        elif storage in self.held_since:
            spans = [*spans, (self.held_since[storage], claims[-1][1])]
        return _join([(home.created, home.released), *spans, *replay.node_spans[storage]])

    def list_stays(self) -> list[Stay]:
        """Every block of the step but those inside of ops and replays."""
        stays = [Stay(storage=storage, begin=begin, end=end) for storage, begin, end in self.doubles]
        for home in self.replay.trace.storages:
            saved = home.id in self.replay._claims
            for begin, end in self.list_spans(home.id) if saved else [(home.created, home.released)]:
                stays.append(Stay(storage=home.id, begin=begin, end=end))
        return stays

    def _count(self) -> npt.NDArray[np.int64]:
        replay = self.replay
        change = replay._unsaved.copy()
        for storage in replay._claims:
            for begin, end in self.list_spans(storage):
                _add_span(change, begin, end, replay.rounded[storage])
        for storage, begin, end in self.doubles:
            _add_span(change, begin, end, replay.rounded[storage])
        live = np.cumsum(change[:-1])
        for tick, extra in self.spikes.items():
            live[tick] += extra
        return live + replay._workspace


def list_events(trace: Trace) -> list[Event]:
    """Saves, needs, and the end of every claim, in order; a claim that ends at tick t ends before entry t."""
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
    """Sizes as the device's allocator counts them."""
    array = np.asarray(sizes, dtype=np.int64)
    return -(-array // alignment_bytes) * alignment_bytes


def _join(spans: Spans) -> Spans:
    """The union of spans, in order, without overlaps."""
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
