"""The step as it is, where that fits."""

from __future__ import annotations

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.simulator.simulate import simulate

EVERYTHING_FITS = "nothing to do"
"""The name of the empty plan that is carried out by not attaching anything."""


def keep_all_if_it_fits(trace: Trace, costs: Costs, budget_bytes: int) -> Plan | None:
    """The empty plan, where nothing has to be done at all."""
    plan = Plan(
        trace_digest=costs.trace_digest, strategy=EVERYTHING_FITS, budget_bytes=budget_bytes, decisions=(), segments=()
    )
    return plan if simulate(trace, costs, plan).peak_bytes <= budget_bytes else None
