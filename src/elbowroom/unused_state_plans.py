"""Plans for steps beside state that they do not use: it stays, or it is away."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from elbowroom.errors import Infeasible
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.lease import Lease
from elbowroom.ir.trace import Trace
from elbowroom.ir.unused_state import leave_out_unused_state
from elbowroom.planned_step import PlannedStep
from elbowroom.planner.plain import keep_all_if_it_fits


class LeavesOut(enum.Enum):
    """When state that a step does not use is away during the step."""

    NEVER = "never"
    IF_NOTHING_ELSE_FITS = "if nothing else fits"
    UNLESS_ALL_FITS = "unless all fits"

    @staticmethod
    def of(may_leave: bool, *, is_watched: bool) -> LeavesOut:
        """Return when it is away, given whether it may, and whether ops are watched for their use of state anyway."""
        if not may_leave:
            return LeavesOut.NEVER
        return LeavesOut.UNLESS_ALL_FITS if is_watched else LeavesOut.IF_NOTHING_ELSE_FITS


def plan_beside_unused(
    make: Callable[[Trace, Costs], PlannedStep],
    trace: Trace,
    costs: Costs,
    leaves_out: LeavesOut,
    lease: Lease,
    min_bytes: int,
) -> PlannedStep:
    """Return the plan of a step.

    Args:
        make: plans a step within the lease.
        lease: limits on both tiers. What the lower one cannot hold is not left out.
        min_bytes: smaller storages never leave.

    Raises:
        Infeasible: no plan fits.
    """
    without = trace if leaves_out is LeavesOut.NEVER else leave_out_unused_state(trace, min_bytes)
    unused_bytes = sum(each.nbytes for each in trace.storages) - sum(each.nbytes for each in without.storages)
    if without is trace or (lease.host_bytes is not None and unused_bytes > lease.host_bytes):
        return make(trace, costs)
    their_costs = dataclasses.replace(costs, trace_digest=digest(without))
    if leaves_out is LeavesOut.UNLESS_ALL_FITS:
        fits = keep_all_if_it_fits(trace, costs, lease.device_bytes) is not None
        return make(trace, costs) if fits else make(without, their_costs)
    try:
        return make(trace, costs)
    except Infeasible:
        return make(without, their_costs)
