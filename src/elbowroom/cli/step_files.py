"""Reads the files that describe one step: a run, or a trace with its plan; and the results of `elbowroom compare`."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elbowroom.cli.journal_files import load_journal
from elbowroom.cli.sources import check_belongs, find_costs, load_plan, load_trace
from elbowroom.cli.terminal import Terminal
from elbowroom.errors import TraceError, UsageError
from elbowroom.ir import files
from elbowroom.ir.check import check, check_noun, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.digest import digest
from elbowroom.ir.journal import NO_STEPS, Journal
from elbowroom.ir.plan import Plan
from elbowroom.ir.run_step import RUN_STEP_VERSION, RunStep
from elbowroom.ir.sliced_trace import apply_cuts
from elbowroom.ir.text_files import read_text
from elbowroom.ir.timeline import Activity
from elbowroom.ir.trace import Trace

if TYPE_CHECKING:
    from elbowroom.planner.options import Manages
    from elbowroom.report.page.content import PlanPoint

_HEAD_CHARS = 4096
_JOURNAL = '"elbowroom.journal"'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFiles:
    """One step as its files describe it.

    Attributes:
        plan: None for the plain step.
        budget_bytes: 0 if there is none.
        host_bytes: capacity of the tier below; None for unlimited.
        activities: measured; empty if none were recorded.
    """

    trace: Trace
    costs: Costs
    plan: Plan | None
    budget_bytes: int
    journal: Journal = NO_STEPS
    host_bytes: int | None = None
    activities: tuple[Activity, ...] = ()


def load_step(
    terminal: Terminal,
    path: Path,
    *,
    trace_file: Path | None,
    plan_file: Path | None,
    hardware: str,
    costs_file: Path | None,
) -> StepFiles:
    """Load a step from the file of a run or of a trace, and from the files that complete it.

    Args:
        path: written by `elbowroom run --output` or `elbowroom capture`.

    Raises:
        UsageError: there is no such file, or another one is needed.
        TraceError: a file is damaged, or they do not belong together.
    """
    head = files.peek(path, _HEAD_CHARS)
    if '"elbowroom.trace"' in head:
        if trace_file is not None:
            raise UsageError(f"{path} is a trace: leave out --trace {trace_file}")
        return _load_given(terminal, path, plan_file, hardware, costs_file)
    if _JOURNAL not in head and '"command"' not in head:
        raise TraceError(
            f"{path} is neither a trace, which `elbowroom capture --output` writes, nor a run, which `elbowroom run "
            "--output` writes"
        )
    journal, budget_bytes = load_journal(path)
    found = load_run_step(path)
    if trace_file is not None:
        given = _load_given(terminal, trace_file, plan_file, hardware, costs_file)
        return dataclasses.replace(given, journal=journal, budget_bytes=budget_bytes or given.budget_bytes)
    if found is None:
        raise UsageError(
            f"{path} has measurements, but no planned step: give its --trace, --plan and --costs, which "
            "`elbowroom run` writes with --save-trace, --save-plan and --save-costs"
        )
    if plan_file is not None or costs_file is not None:
        raise UsageError(f"{path} has its own plan and costs: --plan and --costs belong to --trace")
    check_belongs("--trace", hardware, costs_file)
    return StepFiles(
        trace=found.trace,
        costs=found.costs,
        plan=found.plan,
        budget_bytes=found.budget_bytes,
        journal=journal,
        host_bytes=found.host_bytes,
        activities=found.activities,
    )


def _load_given(
    terminal: Terminal, trace_file: Path, plan_file: Path | None, hardware: str, costs_file: Path | None
) -> StepFiles:
    trace = load_trace(trace_file)
    plan = None if plan_file is None else load_plan(plan_file, trace)
    costs = find_costs(terminal, trace, hardware, costs_file)
    if plan is not None:
        trace, costs, plan = apply_cuts(trace, costs, plan)
    return StepFiles(trace=trace, costs=costs, plan=plan, budget_bytes=0 if plan is None else plan.budget_bytes)


def load_run_step(path: Path) -> RunStep | None:
    """Load the step beside a journal; None if the file has none.

    Raises:
        TraceError: the step is damaged or of another version.
    """
    if _JOURNAL not in files.peek(path, _HEAD_CHARS):
        return None
    found = files.load_fields({"step": RunStep, "step_version": int}, path)
    if "step" not in found:
        return None
    if found.get("step_version") != RUN_STEP_VERSION:
        raise TraceError(f"{path}: its step is of a version that this Elbowroom does not read")
    step: RunStep = found["step"]
    try:
        check_trace(step.trace)
        check_noun(step.costs)
        for value in (step.plan, step.costs):
            if value.trace_digest != digest(step.trace):
                raise TraceError(f"its {type(value).__name__} is for another trace than its own")
        check(step.trace, step.plan)
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    return step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """Plans of one step within several budgets.

    Attributes:
        manages: storages that they may move.
    """

    manages: Manages
    plans: tuple[PlanPoint, ...]


def load_front(path: Path, step: StepFiles) -> Front:
    """Load the plans of a comparison that fit their budget.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        TraceError: it was not written by `elbowroom compare`, or is for another trace or machine than the step's.
    """
    from elbowroom.planner.options import Manages

    text = "".join(read_text(path))
    try:
        document = json.loads(text)
        manages = Manages(document["manages"])
        plans = tuple(_read_point(entry) for entry in document["entries"] if entry["plan"] is not None)
        hardware = str(document["hardware"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise TraceError(f"{path} was not written by `elbowroom compare --output`") from error
    trace_digest, own_digest = document.get("digest"), step.costs.trace_digest
    if not isinstance(trace_digest, str):
        raise TraceError(
            f"{path} does not say which trace it is for, as files of older versions: run `elbowroom compare` again"
        )
    if trace_digest != own_digest:
        raise TraceError(f"{path} compares plans for trace {trace_digest[:12]}, but this is {own_digest[:12]}")
    if hardware != step.costs.profile_name:
        raise TraceError(
            f"{path} compares plans for the machine {hardware!r}, but the costs of this step are those of "
            f"{step.costs.profile_name!r}"
        )
    return Front(manages=manages, plans=plans)


def _read_point(entry: Any) -> PlanPoint:
    """Return one plan of a comparison.

    Raises:
        ValueError, KeyError, TypeError: it is not as `elbowroom compare` writes it.
    """
    from elbowroom.report.page.content import PlanPoint

    point = PlanPoint(
        strategy=str(entry["strategy"]),
        budget_bytes=int(entry["budget_bytes"]),
        peak_bytes=int(entry["plan"]["peak_bytes"]),
        step_seconds=float(entry["plan"]["step_seconds"]),
    )
    if min(point.budget_bytes, point.peak_bytes, point.step_seconds) < 0 or not math.isfinite(point.step_seconds):
        raise ValueError("a number of bytes or seconds is negative or infinite")
    return point
