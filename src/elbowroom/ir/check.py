"""The judge: is a value consistent with itself and with what it belongs to?

Slow, plain, and knowing nothing of any planner or simulator.
"""

from __future__ import annotations

from elbowroom.errors import TraceError
from elbowroom.ir.plan import Choice, Decision, Plan, Segment
from elbowroom.ir.trace import Op, Trace, find_gaps, find_movable


def check_trace(trace: Trace) -> None:
    """Judge a trace by itself.

    Raises:
        TraceError: with the place of the first thing that cannot be.
    """
    for index, storage in enumerate(trace.storages):
        _require(storage.id == index, f"storages[{index}] has id {storage.id}")
        _require(storage.nbytes >= 0, f"storages[{index}] has {storage.nbytes} bytes")
        _require(
            -1 <= storage.created < max(trace.end, 1) and storage.created <= storage.released <= trace.end,
            f"storages[{index}] lives from {storage.created} to {storage.released} in a trace that ends at {trace.end}",
        )
    ticks: set[int] = set()
    for kind, entries in (("ops", trace.ops), ("saves", trace.saves), ("needs", trace.needs)):
        last = -1
        for index, entry in enumerate(entries):
            _require(last < entry.tick < trace.end, f"{kind}[{index}] has tick {entry.tick} after {last}")
            _require(entry.tick not in ticks, f"{kind}[{index}] shares tick {entry.tick} with another entry")
            ticks.add(entry.tick)
            last = entry.tick
    _require(len(ticks) == trace.end, f"{len(ticks)} entries do not fill {trace.end} ticks")
    for index, op in enumerate(trace.ops):
        for view in (*op.reads, *op.writes):
            _require(
                0 <= view.storage < len(trace.storages) and view.version >= 0 and min(view.shape, default=0) >= 0,
                f"ops[{index}] ({op.name}) has a view of storage {view.storage}, version {view.version}, {view.shape}",
            )
        _require(op.flops >= 0, f"ops[{index}] ({op.name}) has {op.flops} flops")
    for index, save in enumerate(trace.saves):
        _require(0 <= save.storage < len(trace.storages), f"saves[{index}] is of storage {save.storage}")
        _require(save.tick < save.released <= trace.end, f"saves[{index}] is released at {save.released}")
    for index, need in enumerate(trace.needs):
        _require(0 <= need.save < len(trace.saves), f"needs[{index}] is of save {need.save}")
        _require(trace.saves[need.save].tick < need.tick, f"needs[{index}] comes before its save")
        _require(need.tick < need.released <= trace.end, f"needs[{index}] is released at {need.released}")


def check(trace: Trace, plan: Plan) -> None:
    """Judge a plan for a trace: every move is possible, and everything is back when it is needed.

    Raises:
        TraceError: with the first decision that cannot be carried out, and why.
    """
    gaps = {(storage, gap.index): gap for storage, found in find_gaps(trace).items() for gap in found}
    movable = find_movable(trace)
    decided: dict[tuple[int, int], Decision] = {}
    for decision in plan.decisions:
        key = (decision.storage, decision.gap)
        place = f"decision for storage {decision.storage}, gap {decision.gap}"
        _require(key in gaps, f"{place}: there is no such gap")
        _require(key not in decided, f"{place}: it is decided twice")
        _require(decision.storage in movable, f"{place}: this storage may not leave the device")
        gap = gaps[key]
        decided[key] = decision
        if decision.choice is Choice.OFFLOAD:
            in_order = gap.opens <= decision.leave <= decision.release < gap.closes
            _require(in_order and decision.release <= decision.back <= gap.closes, f"{place}: ticks out of order")
        elif decision.choice is Choice.RECOMPUTE:
            _require(gap.opens <= decision.leave < gap.closes, f"{place}: dropped outside of its gap")
            _require(0 <= decision.segment < len(plan.segments), f"{place}: there is no segment {decision.segment}")
            outputs = plan.segments[decision.segment].outputs
            _require(decision.storage in outputs, f"{place}: segment {decision.segment} does not make it")
    for index, segment in enumerate(plan.segments):
        _check_segment(trace, plan, index, segment, decided)


def _check_segment(
    trace: Trace, plan: Plan, index: int, segment: Segment, decided: dict[tuple[int, int], Decision]
) -> None:
    """Walk the replay: every read is a leaf with the right contents, or was made before."""
    gaps = find_gaps(trace)
    uses = [
        gaps[key[0]][key[1]].closes
        for key, decision in decided.items()
        if decision.choice is Choice.RECOMPUTE and decision.segment == index
    ]
    place = f"segment {index}"
    _require(bool(uses), f"{place}: nothing uses it")
    tick = min(uses)
    ops = {op.tick: op for op in trace.ops}
    made: dict[int, int] = {}
    _require(list(segment.ops) == sorted(set(segment.ops)), f"{place}: its ops are not in order")
    for leaf in segment.leaves:
        _check_leaf(trace, leaf, tick, place)
    for op_tick in segment.ops:
        _require(op_tick in ops, f"{place}: tick {op_tick} is not an op")
        op = ops[op_tick]
        _require(not op.barrier, f"{place}: {op.name} must not be replayed: {op.barrier}")
        for view in op.reads:
            if view.storage in segment.leaves:
                found = _version_at(trace.ops, view.storage, trace.storages[view.storage].created, tick)
            else:
                found = made.get(view.storage, -1)
            _require(found == view.version, f"{place}: {op.name} reads version {view.version} of storage "
                     f"{view.storage}, but finds {found}")  # fmt: skip
        for view in op.writes:
            _require(view.storage not in segment.leaves, f"{place}: {op.name} writes to leaf {view.storage}")
            made[view.storage] = view.version
    for output in segment.outputs:
        final = _version_at(trace.ops, output, trace.storages[output].created, tick)
        _require(made.get(output) == final, f"{place}: it does not make storage {output}")


def _check_leaf(trace: Trace, leaf: int, tick: int, place: str) -> None:
    home = trace.storages[leaf]
    held = home.created < tick < home.released
    claimed = any(save.storage == leaf and save.tick < tick < save.released for save in trace.saves)
    _require(held or claimed, f"{place}: nothing holds leaf {leaf} at tick {tick}")


def _version_at(ops: tuple[Op, ...], storage: int, created: int, tick: int) -> int:
    writes = [view.version for op in ops if op.tick < tick for view in op.writes if view.storage == storage]
    return writes[-1] if writes else (0 if created < 0 else -1)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise TraceError(what)
