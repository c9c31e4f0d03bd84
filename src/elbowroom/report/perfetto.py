"""Trace of one step in Chrome's JSON format, for ui.perfetto.dev and chrome://tracing.

Lanes are threads, forecast and measured ones in a process each; bytes by class are counters.
Source: "Trace Event Format", Google, 2016.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from elbowroom.ir.labels import name_module, name_storage, shorten
from elbowroom.ir.timeline import Activity, Lane
from elbowroom.report.step_view import CLASSES, StepView

_FORECAST = 1
_MEASURED = 2


def write_perfetto(view: StepView, budget_bytes: int = 0, measured: Sequence[Activity] = ()) -> bytes:
    """Return the JSON text of a trace.

    Args:
        budget_bytes: drawn as a counter; 0 for none.
        measured: activities of a measured step.
    """
    events = [
        *_name_lanes(_FORECAST, "forecast", view.activities),
        *(_describe(view, each, _FORECAST) for each in view.activities),
        *_count_bytes(view, budget_bytes),
    ]
    if measured:
        events += _name_lanes(_MEASURED, "measured", measured)
        events += [_describe(view, each, _MEASURED) for each in measured]
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"name": view.trace.name, "machine": view.costs.profile_name, "strategy": view.plan.strategy},
        "traceEvents": events,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _name_lanes(process: int, title: str, activities: Iterable[Activity]) -> list[dict[str, Any]]:
    used = {each.lane for each in activities}
    named = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": title}}]
    for index, lane in enumerate(Lane):
        if lane in used:
            named.append({"ph": "M", "pid": process, "tid": index, "name": "thread_name", "args": {"name": str(lane)}})
            place = {"sort_index": index}
            named.append({"ph": "M", "pid": process, "tid": index, "name": "thread_sort_index", "args": place})
    return named


def _describe(view: StepView, activity: Activity, process: int) -> dict[str, Any]:
    trace, subject = view.trace, activity.subject
    name = str(activity.lane)
    details: dict[str, Any] = {}
    if activity.lane is Lane.COMPUTE:
        op = trace.ops[subject]
        name = shorten(op.name)
        details = {"op": op.name, "module": None if op.module is None else name_module(op.module), "line": op.line}
    elif 0 <= subject < len(trace.storages):
        home = trace.storages[subject]
        name = f"{activity.lane} {name_storage(home)}"
        details = {"storage": subject, "nbytes": home.nbytes, "class": str(home.role), "module": home.module}
    return {
        "ph": "X",
        "pid": process,
        "tid": list(Lane).index(activity.lane),
        "name": name,
        "cat": str(activity.lane),
        "ts": round(activity.begin * 1e6, 3),
        "dur": round((activity.end - activity.begin) * 1e6, 3),
        "args": details,
    }


def _count_bytes(view: StepView, budget_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield a counter sample for each entry at which the bytes change."""
    common = {"ph": "C", "pid": _FORECAST, "tid": 0}
    present = [name for name in CLASSES if view.bytes_by_class[name].any()]
    columns = [view.bytes_by_class[name].tolist() for name in present]
    last: tuple[int, ...] = ()
    for tick, row in enumerate(zip(*columns, strict=True)):
        if row != last:
            last = row
            counts = dict(zip(present, row, strict=True))
            yield {**common, "name": "bytes on the device", "ts": round(view.begins[tick] * 1e6, 3), "args": counts}
    for seconds in (0.0, view.seconds) if budget_bytes else ():
        yield {**common, "name": "budget", "ts": round(seconds * 1e6, 3), "args": {"bytes": budget_bytes}}
