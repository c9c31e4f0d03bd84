"""Writes the file of a run: its journal, and beside it the step that is expected next."""

from __future__ import annotations

import os

from elbowroom.ir.files import save, to_json
from elbowroom.ir.journal import Journal
from elbowroom.ir.run_step import RUN_STEP_VERSION, RunStep
from elbowroom.plan_cache import PlanCache


def save_run(path: str | os.PathLike[str], journal: Journal, cache: PlanCache) -> None:
    """Write a journal and the expected step, if one is planned.

    Raises:
        UsageError: the file cannot be written.
    """
    beside = {}
    if (entry := cache.current) is not None:
        step = RunStep(
            trace=entry.planned.trace,
            costs=entry.planned.costs,
            plan=entry.planned.plan,
            budget_bytes=cache.lease.device_bytes,
            host_bytes=cache.lease.host_bytes,
            activities=entry.activities,
        )
        beside = {"step": to_json(step), "step_version": RUN_STEP_VERSION}
    save(journal, path, beside)
