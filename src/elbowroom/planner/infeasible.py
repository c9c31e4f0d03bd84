"""The error that says why no plan fits: which op is in the way, and what stands on the device when it runs."""

from __future__ import annotations

from collections import Counter

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.labels import name_group, name_storages, shorten
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import STATE_ROLES, Storage, Trace
from elbowroom.units import format_bytes

MOST_IN_THE_WAY = 5
"""Kinds of blocks that an Infeasible names."""


def explain_infeasible(
    trace: Trace, costs: Costs, plan: Plan, forecast: Forecast, *, host_bytes: int | None, needed_host_bytes: int
) -> Infeasible:
    """Return the error for a plan that does not fit its budget, or not what the tier below may hold.

    Args:
        plan, forecast: the plan that comes nearest, and its forecast.
        host_bytes: what the tier below may hold; None for any amount.
        needed_host_bytes: what it would have to hold; 0 where that is not the limit.
    """
    index = Lifetimes(trace).op_at(forecast.peak_tick)
    op = None if index is None else trace.ops[index]
    lifetimes = Lifetimes(trace, plan)
    held = sorted(count_held(trace, costs, plan, forecast).items(), key=lambda each: (-each[1], each[0]))
    return Infeasible(
        needed_bytes=forecast.peak_bytes,
        budget_bytes=plan.budget_bytes,
        op="the step" if op is None else op.name,
        module=None if op is None else op.module,
        line="" if op is None else op.line,
        is_whole_step=host_bytes is None or forecast.lower_tier_bytes <= host_bytes,
        in_the_way=tuple(held[:MOST_IN_THE_WAY]),
        host_bytes=host_bytes,
        needed_host_bytes=needed_host_bytes,
        is_estimated=not costs.measured,
        state_bytes=sum(
            each.nbytes
            for each in trace.storages
            if each.role in STATE_ROLES and lifetimes.is_there(each.id, forecast.peak_tick)
        ),
    )


def note_slices(error: Infeasible, sliced_bytes: int, whole_bytes: int) -> Infeasible:
    """Add to an error what the step needs with ops in slices and without.

    Args:
        sliced_bytes: budget for which there are slices that fit.
    """
    error.needed_bytes = max(error.needed_bytes, sliced_bytes)
    error.note = f"That is with ops in slices; whole ops need {format_bytes(whole_bytes)} ({whole_bytes} bytes)."
    error.locate(error.module, error.line)
    return error


def count_held(trace: Trace, costs: Costs, plan: Plan, forecast: Forecast) -> Counter[str]:
    """Count the bytes that are on the device at the forecast peak, by name.

    Bytes that neither a storage nor a workspace takes are "replays and moves".

    Cost: linear in the trace.
    """
    lifetimes, tick = Lifetimes(trace, plan), forecast.peak_tick
    groups: dict[str, list[Storage]] = {}
    for storage in trace.storages:
        if lifetimes.is_there(storage.id, tick):
            groups.setdefault(name_group(storage), []).append(storage)
    unit = costs.alignment_bytes
    held = Counter[str]()
    for storages in groups.values():
        held[name_storages(storages)] = sum(-(-each.nbytes // unit) * unit for each in storages)
    index = lifetimes.op_at(tick)
    if index is not None and trace.ops[index].tick == tick:
        held[f"workspace of {shorten(trace.ops[index].name)}"] = costs.workspace_bytes[index]
    held["replays and moves"] = forecast.peak_bytes - held.total()
    return +held
