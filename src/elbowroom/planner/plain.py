"""The empty plan, for a step that fits as it is."""

from __future__ import annotations

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.simulate import simulate

EVERYTHING_FITS = "nothing to do"
"""Name of the empty plan; nothing is attached to execute it."""


def keep_all_if_it_fits(trace: Trace, costs: Costs, budget_bytes: int) -> Plan | None:
    """Return the empty plan if the plain step fits; otherwise None."""
    plan = Plan(
        trace_digest=costs.trace_digest, strategy=EVERYTHING_FITS, budget_bytes=budget_bytes, decisions=(), segments=()
    )
    return plan if simulate(trace, costs, plan).peak_bytes <= budget_bytes else None
