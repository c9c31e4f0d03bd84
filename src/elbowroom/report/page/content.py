"""Content of the page, and its conversion to JSON: columns of numbers, and tables of names that they refer to."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from elbowroom.ir.journal import NO_STEPS, Journal
from elbowroom.ir.labels import name_module, name_storage, shorten
from elbowroom.ir.timeline import Activity, Lane
from elbowroom.report.choice_costs import ChoiceCosts, list_choice_costs
from elbowroom.report.colours import CHOICE_COLOURS, CLASS_COLOURS, LANE_COLOURS
from elbowroom.report.modules import count_by_module
from elbowroom.report.steady import Steady, find_steady
from elbowroom.report.step_view import CLASSES, StepView, lay_out_blocks

MOST_COLUMNS = 900
"""Points of a curve of bytes. Each is the highest entry of its stretch of time, so no peak is lost."""

MOST_STEPS = 400
"""Measured steps that are drawn: the latest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint:
    """Forecast of one plan, for the front of budget against step time."""

    strategy: str
    budget_bytes: int
    peak_bytes: int
    step_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """One step, planned and plain, with its measurements.

    Attributes:
        budget_bytes: 0 if there is none.
        journal: measured steps; may be empty.
        bounds: (budget in bytes, step seconds that no plan within it can beat).
        front: plans within other budgets.
        measured: activities of a measured step; empty if none was recorded.
    """

    planned: StepView
    plain: StepView
    budget_bytes: int
    journal: Journal = NO_STEPS
    bounds: tuple[tuple[int, float], ...] = ()
    front: tuple[PlanPoint, ...] = ()
    measured: tuple[Activity, ...] = ()


def describe_page(content: PageContent) -> dict[str, Any]:
    """Return the page's data as JSON values. Seconds are rounded to 0.1 us.

    Cost: linear in the trace, and one layout of its blocks.
    """
    view = content.planned
    names = _Names()
    steady = find_steady(content.journal)
    return {
        "title": view.trace.name,
        "device": view.trace.device,
        "machine": view.costs.profile_name,
        "are_costs_measured": view.costs.measured,
        "strategy": view.plan.strategy,
        "budget_bytes": content.budget_bytes,
        "colours": {"classes": CLASS_COLOURS, "choices": CHOICE_COLOURS, "lanes": LANE_COLOURS},
        "planned": _describe_curve(view, names),
        "plain": _describe_curve(content.plain, names),
        "blocks": _describe_blocks(view),
        "storages": _describe_storages(view, names),
        "gaps": _describe_gaps(list_choice_costs(view), names),
        "lanes": _describe_activities(view.activities),
        "ops": _describe_ops(view, names),
        "measured_lanes": _describe_activities(content.measured),
        "modules": _describe_modules(view),
        "comparison": _compare(content, steady),
        "steps": _describe_steps(content.journal),
        "front": _describe_front(content, steady),
        "names": names.texts,
    }


class _Names:
    """Table of texts, each once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """Return the position of a text in the table."""
        if text not in self._places:
            self._places[text] = len(self.texts)
            self.texts.append(text)
        return self._places[text]


def _round(seconds: Iterable[float]) -> list[float | None]:
    """Return seconds as JSON numbers; None for an infinite one."""
    return [round(each, 7) if math.isfinite(each) else None for each in seconds]


def _describe_curve(view: StepView, names: _Names) -> dict[str, Any]:
    ticks = choose_ticks(view, MOST_COLUMNS)
    ops = {op.tick: op for op in view.trace.ops}
    places = []
    current = "begin of the step"
    last = 0
    for tick in ticks:
        for each in range(last, tick + 1):
            if each in ops:
                current = f"{shorten(ops[each].name)} in {name_module(ops[each].module or '')}"
        last = tick + 1
        places.append(names.place(current))
    return {
        "seconds": round(view.seconds, 7),
        "peak_bytes": view.forecast.peak_bytes,
        "peak_at": round(view.begins[view.forecast.peak_tick], 7) if view.begins else 0.0,
        "at": _round(view.begins[tick] for tick in ticks),
        "bytes": {name: view.bytes_by_class[name][ticks].tolist() for name in CLASSES},
        "places": places,
    }


def choose_ticks(view: StepView, most: int) -> list[int]:
    """Return the entry with the most bytes of each of at most `most` stretches of time, in order."""
    live = np.array(view.forecast.live_bytes, dtype=np.int64)
    if len(live) <= most:
        return list(range(len(live)))
    whole = view.seconds or 1.0
    columns = np.minimum((np.array(view.begins[:-1]) / whole * most).astype(np.int64), most - 1)
    order = np.lexsort((-live, columns))
    first = np.unique(columns[order], return_index=True)[1]
    return sorted(int(tick) for tick in order[first])


def _describe_blocks(view: StepView) -> dict[str, Any]:
    blocks = view.blocks
    return {
        "storage": [block.storage for block in blocks],
        "begin": _round(block.begin for block in blocks),
        "end": _round(block.end for block in blocks),
        "nbytes": [block.nbytes for block in blocks],
        "offset": list(lay_out_blocks(view).offsets),
    }


def _describe_storages(view: StepView, names: _Names) -> dict[str, Any]:
    storages = view.trace.storages
    return {
        "nbytes": [each.nbytes for each in storages],
        "class": [CLASSES.index(str(each.role)) for each in storages],
        "label": [names.place(name_storage(each)) for each in storages],
        "module": [-1 if each.module is None else names.place(each.module) for each in storages],
        "line": [names.place(each.line) for each in storages],
    }


def _describe_gaps(costs: Sequence[ChoiceCosts], names: _Names) -> dict[str, Any]:
    return {
        "storage": [each.storage for each in costs],
        "decision": [str(each.decision) for each in costs],
        "seconds": _round(each.gap_seconds for each in costs),
        "kept_peak_bytes": [each.kept_peak_bytes for each in costs],
        "out": _round(each.out_seconds for each in costs),
        "back": _round(each.back_seconds for each in costs),
        "exposed": _round(each.exposed_seconds for each in costs),
        "replay": _round(each.replay_seconds for each in costs),
        "replay_ops": [each.replay_ops for each in costs],
        "is_movable": [int(each.is_movable) for each in costs],
        "reason": [names.place(each.reason) for each in costs],
    }


def _describe_activities(activities: Sequence[Activity]) -> dict[str, Any]:
    lanes = list(Lane)
    return {
        "lane": [lanes.index(each.lane) for each in activities],
        "subject": [each.subject for each in activities],
        "begin": _round(each.begin for each in activities),
        "end": _round(each.end for each in activities),
    }


def _describe_ops(view: StepView, names: _Names) -> dict[str, Any]:
    return {
        "name": [names.place(shorten(op.name)) for op in view.trace.ops],
        "module": [-1 if op.module is None else names.place(op.module) for op in view.trace.ops],
    }


def _describe_modules(view: StepView) -> list[list[Any]]:
    counted = count_by_module(view.trace, view.costs, view.plan, view.forecast)
    return [[each.path, *each.list_figures()] for each in counted]


def _compare(content: PageContent, steady: Steady | None) -> list[list[Any]]:
    """Return rows (name, unit, plain, forecast, measured); None for a figure that is not known."""
    plain, planned = content.plain.forecast, content.planned.forecast

    def measure(name: str) -> Any:
        return None if steady is None else getattr(steady, name)

    return [
        ["peak", "bytes", plain.peak_bytes, planned.peak_bytes, measure("peak_bytes")],
        ["step time", "seconds", plain.step_seconds, planned.step_seconds, measure("seconds")],
        ["stalls", "seconds", 0.0, planned.stall_seconds, measure("stall_seconds")],
        ["offloaded a step", "bytes", 0, planned.offloaded_bytes, measure("offloaded_bytes")],
        ["reloaded a step", "bytes", 0, planned.reloaded_bytes, measure("reloaded_bytes")],
        ["segments recomputed", "count", 0, planned.replays, measure("recomputed")],
        ["recomputing", "seconds", 0.0, planned.recompute_seconds, None],
    ]


def _describe_steps(journal: Journal) -> list[list[Any]]:
    return [
        [each.step, str(each.mode), round(each.seconds, 7), each.peak_bytes, round(each.stall_seconds, 7), each.note]
        for each in journal.steps[-MOST_STEPS:]
    ]


def _describe_front(content: PageContent, steady: Steady | None) -> dict[str, Any]:
    plain, planned = content.plain.forecast, content.planned.forecast
    measured = None
    if steady is not None and steady.peak_bytes is not None:
        measured = [steady.peak_bytes, steady.seconds]
    return {
        "bounds": [[nbytes, seconds] for nbytes, seconds in content.bounds if math.isfinite(seconds)],
        "plans": [[each.peak_bytes, each.step_seconds, each.strategy, each.budget_bytes] for each in content.front],
        "plain": [plain.peak_bytes, plain.step_seconds],
        "own": [planned.peak_bytes, planned.step_seconds],
        "measured": measured,
    }
