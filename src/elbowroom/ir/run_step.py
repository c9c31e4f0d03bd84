"""RunStep: the step that a run planned last, kept beside its journal so that one file is enough to show it."""

from __future__ import annotations

import dataclasses

from elbowroom.ir.costs import Costs
from elbowroom.ir.plan import Plan
from elbowroom.ir.timeline import Activity
from elbowroom.ir.trace import Trace

RUN_STEP_VERSION = 1
"""Version of a RunStep in a file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStep:
    """A planned step, and what was measured of it.

    Attributes:
        budget_bytes: of the run.
        host_bytes: capacity of the tier below; None for unlimited.
        activities: moves, waits and replays of the last step that followed the plan.
    """

    trace: Trace
    costs: Costs
    plan: Plan
    budget_bytes: int
    host_bytes: int | None = None
    activities: tuple[Activity, ...] = ()
