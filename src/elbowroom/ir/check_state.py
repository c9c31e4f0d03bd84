"""Validates a plan's moves of the model's state, independently of planner and simulator."""

from __future__ import annotations

from collections.abc import Mapping

from elbowroom.errors import TraceError
from elbowroom.ir.plan import Choice, Decision, Plan
from elbowroom.ir.state import get_back, list_away
from elbowroom.ir.trace import Span, Trace


def check_state(trace: Trace, plan: Plan, replays: Mapping[int, int]) -> None:
    """Check that the moves of the state are possible, and that each op and each replay finds what it uses.

    Args:
        replays: tick of the need at which each segment of the plan is replayed.

    Raises:
        TraceError: names the first move that cannot be carried out, or the op or segment that misses a storage.
    """
    if not plan.state:
        return
    keys = [(decision.storage, decision.gap) for decision in plan.state]
    _require(keys == sorted(set(keys)), "state: the decisions are not in order, or one is repeated")
    ticks = frozenset(trace.state_ticks)
    for decision in plan.state:
        _check_decision(trace, decision, ticks)
    away = list_away(trace, plan)
    for op in trace.ops:
        for view in (*op.reads, *op.writes):
            _require(not _covers(away, view.storage, op.tick), f"{op.name} at tick {op.tick} uses storage "
                     f"{view.storage}, which is away")  # fmt: skip
    ops = {op.tick: op for op in trace.ops}
    for index, segment in enumerate(plan.segments):
        read = {view.storage for tick in segment.ops for view in ops[tick].reads}
        for storage in sorted(read.union(segment.leaves)):
            _require(not _covers(away, storage, replays[index]), f"segment {index}: storage {storage} is away when it "
                     f"runs, at {replays[index]}")  # fmt: skip


def _check_decision(trace: Trace, decision: Decision, ticks: frozenset[int]) -> None:
    place = f"state: decision for storage {decision.storage}, gap {decision.gap}"
    gaps = trace.state_gaps.get(decision.storage, ())
    _require(0 <= decision.gap < len(gaps), f"{place}: there is no such gap")
    gap, end = gaps[decision.gap], trace.end
    _require(decision.choice is Choice.OFFLOAD and decision.segment == -1, f"{place}: state can only be offloaded")
    _require(decision.leave == gap.opens, f"{place}: its copy begins at {decision.leave}, not where the gap opens")
    _require(decision.release in ticks, f"{place}: state cannot be released at tick {decision.release}")
    is_on_demand = decision.back == gap.closes
    _require(is_on_demand or decision.back in ticks, f"{place}: no reload can begin at tick {decision.back}")
    _require(is_on_demand or trace.is_reloaded(gap), f"{place}: it is released where its gap closes, and not reloaded")
    release, back = gap.unwrap(decision.release, end), get_back(gap, decision, end)
    _require(gap.opens <= release < back <= gap.opens + gap.length(end), f"{place}: ticks out of order")
    is_made = trace.storages[decision.storage].created >= 0
    _require(not is_made or release < end, f"{place}: it has to be released in the step that makes it")


def _covers(away: Mapping[int, list[Span]], storage: int, tick: int) -> bool:
    return any(begin <= tick < back for begin, back in away.get(storage, ()))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise TraceError(what)
