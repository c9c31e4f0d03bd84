"""Forecast beside what was measured, as text."""

from __future__ import annotations

from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.journal import Journal
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace


def summarize(
    *,
    budget_bytes: int,
    journal: Journal,
    trace: Trace | None,
    costs: Costs | None,
    plan: Plan | None,
    forecast: Forecast | None,
) -> str:
    return ""
