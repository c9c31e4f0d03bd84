"""Parts of a step in which optimizers update parameters: groups of them, as many as suited the budget at that time."""

from __future__ import annotations

from elbowroom.ir.forecast import Forecast
from elbowroom.ir.trace import Role, Trace


def find_peak_beside_updates(trace: Trace, forecast: Forecast) -> int:
    """Return the peak in bytes of all but these parts.

    An update begins after the last save or need before it uses optimizer state, and ends before the next one.
    """
    states = {each.id for each in trace.storages if each.role is Role.OPTIMIZER_STATE}
    part = 0
    parts: dict[int, int] = {}  # by tick of each entry
    updates = set[int]()
    ops = {op.tick: op for op in trace.ops}
    for tick in range(trace.end):
        op = ops.get(tick)
        part += op is None
        parts[tick] = part
        if op is not None and any(view.storage in states for view in (*op.reads, *op.writes)):
            updates.add(part)
    return max((forecast.live_bytes[tick] for tick, part in parts.items() if part not in updates), default=0)
