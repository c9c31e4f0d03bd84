"""View of one step, planned or plain: blocks with their times, bytes by class, and the work of each lane.

Everything that shows a step over time is made from it: the page, the Perfetto trace and the memory snapshot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.plan import Plan
from elbowroom.ir.timeline import Activity, Lane
from elbowroom.ir.trace import Trace
from elbowroom.layout.lay_out import lay_out
from elbowroom.report.colours import CLASS_COLOURS
from elbowroom.simulator.followed_step import FollowedStep
from elbowroom.simulator.planned import PreparedTrace

WORKSPACE = "workspace"
REPLAYS = "replays"
CLASSES = tuple(CLASS_COLOURS)
"""Classes of bytes, from the bottom of the stack up: the roles, workspaces of ops, and intermediate results of
replays."""

ALLOCATOR = "greedy_by_size"
"""Chooses the offsets at which blocks are shown."""

_SAME_SECONDS = 1e-9
"""Times closer than this differ by rounding alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A storage on the device, from one entry to another.

    Attributes:
        begin_tick, end_tick: it is there during entries begin_tick <= tick < end_tick.
        begin, end: likewise in seconds since the step began.
        nbytes: rounded up as by the device's allocator.
    """

    storage: int
    begin_tick: int
    end_tick: int
    begin: float
    end: float
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One step over time.

    Attributes:
        plan: moves of storages; none in a plain step.
        forecast: of this plan.
        begins: begin of each entry, and the end of the last one, in seconds.
        bytes_by_class: bytes on the device during each entry, for each of `CLASSES`. They add up to
            `forecast.live_bytes`.
        blocks: in order of their begin.
        activities: work of all lanes, in order of their begin.
    """

    trace: Trace
    costs: Costs
    plan: Plan
    forecast: Forecast
    begins: tuple[float, ...]
    bytes_by_class: Mapping[str, npt.NDArray[np.int64]]
    blocks: tuple[Block, ...]
    activities: tuple[Activity, ...]

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.begins[-1]


def view_step(prepared: PreparedTrace, plan: Plan | None = None) -> StepView:
    """Simulate a step and return the view of it.

    Args:
        plan: None for the plain step.

    Raises:
        TraceError: the plan is for another trace.

    Cost: linear in the trace.
    """
    if plan is None:
        plan = make_plain(prepared.costs)
    step = prepared.follow(plan)
    begins = step.forecast.begin_seconds
    blocks = _list_blocks(prepared, step, begins)
    return StepView(
        trace=prepared.trace,
        costs=prepared.costs,
        plan=plan,
        forecast=step.forecast,
        begins=begins,
        bytes_by_class=_count_classes(prepared, step, blocks),
        blocks=blocks,
        activities=_list_activities(prepared, step, begins),
    )


def make_plain(costs: Costs) -> Plan:
    """Return the plan of a plain step: every storage is kept."""
    return Plan(trace_digest=costs.trace_digest, strategy="keep_all", budget_bytes=0, decisions=(), segments=())


def lay_out_blocks(view: StepView) -> Layout:
    """Return offsets for the blocks of a step, in their order, from a layout by size.

    Cost: number of blocks times number of blocks at one time.
    """
    buffers = [
        Buffer(id=index, lower=block.begin_tick, upper=block.end_tick, nbytes=block.nbytes)
        for index, block in enumerate(view.blocks)
    ]
    return lay_out(buffers, ALLOCATOR)


def _list_blocks(prepared: PreparedTrace, step: FollowedStep, begins: Sequence[float]) -> tuple[Block, ...]:
    end = prepared.trace.end
    blocks = []
    for stay in step.stays:
        begin_tick = max(stay.begin, 0)
        end_tick = min(stay.end, end)
        nbytes = int(prepared.rounded[stay.storage])
        if begin_tick < end_tick and nbytes:
            blocks.append(Block(stay.storage, begin_tick, end_tick, begins[begin_tick], begins[end_tick], nbytes))
    return tuple(sorted(blocks, key=lambda block: (block.begin_tick, block.storage)))


def _count_classes(
    prepared: PreparedTrace, step: FollowedStep, blocks: Sequence[Block]
) -> dict[str, npt.NDArray[np.int64]]:
    trace = prepared.trace
    change = {name: np.zeros(trace.end + 1, dtype=np.int64) for name in CLASSES}
    for block in blocks:
        role = str(trace.storages[block.storage].role)
        change[role][block.begin_tick] += block.nbytes
        change[role][block.end_tick] -= block.nbytes
    found = {name: np.cumsum(each)[: trace.end] for name, each in change.items()}
    for op, nbytes in zip(trace.ops, prepared.costs.workspace_bytes, strict=True):
        found[WORKSPACE][op.tick] = nbytes
    live = np.array(step.forecast.live_bytes, dtype=np.int64)
    found[REPLAYS] = live - sum(found[name] for name in CLASSES if name != REPLAYS)
    return found


def _list_activities(prepared: PreparedTrace, step: FollowedStep, begins: Sequence[float]) -> tuple[Activity, ...]:
    """Return moves, waits, replays and ops, with the time outside of ops spread as in the forecast."""
    own = np.array(step.entry_seconds)
    shown = np.array(begins)

    def convert(seconds: float) -> float:
        within = float(np.interp(seconds, own, shown))
        return within + max(0.0, seconds - float(own[-1]))

    found = [dataclasses.replace(each, begin=convert(each.begin), end=convert(each.end)) for each in step.activities]
    stalls = sorted((each.begin, each.end) for each in step.activities if each.lane is Lane.STALL)
    place = 0
    for index, (op, seconds) in enumerate(zip(prepared.trace.ops, prepared.costs.op_seconds, strict=True)):
        begin = float(own[op.tick])
        while place < len(stalls) and stalls[place][1] <= begin + _SAME_SECONDS:
            place += 1
        while place < len(stalls) and stalls[place][0] <= begin + _SAME_SECONDS:  # the op waits for its storages
            begin = stalls[place][1]
            place += 1
        if seconds > 0.0:
            found.append(Activity(Lane.COMPUTE, index, convert(begin), convert(begin + seconds)))
    return tuple(sorted(found, key=lambda each: (each.begin, each.lane, each.subject)))
