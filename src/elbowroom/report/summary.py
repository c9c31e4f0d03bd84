"""Text report: forecast beside measurements, and why each block is where it is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from elbowroom.errors import TraceError, UsageError
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.journal import Journal, Mode
from elbowroom.ir.labels import shorten
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import Trace
from elbowroom.ir.unused_state import list_unused_state
from elbowroom.report.blocks import BlockGroup, count_seconds, explain_blocks
from elbowroom.report.chart import draw_chart
from elbowroom.report.columns import align, wrap
from elbowroom.report.modules import tabulate_modules
from elbowroom.report.state import count_state, tabulate_state
from elbowroom.report.steady import Steady, count_modes, find_steady
from elbowroom.report.step_view import make_plain
from elbowroom.simulator.simulate import simulate
from elbowroom.units import format_bytes, format_seconds

MOST_HELD, MOST_AWAY = 9, 6
"""Rows of the table of blocks, for blocks on the device at the peak and for blocks away."""

TABLES = ("kind", "module")
"""The tables of blocks."""

_MODES = {
    Mode.CAPTURE: "captured",
    Mode.PLANNED: "planned",
    Mode.PLAIN: "plain",
    Mode.DYNAMIC: "dynamic",
    Mode.DRIFTED: "drifted",
}
_MANAGED = {
    "activations": "the model's state stays on the device",
    "everything": "activations, parameters, gradients and optimizer state",
}
_NOTES = {Mode.DRIFTED: "drift", Mode.DYNAMIC: "no plan"}


def summarize(
    *,
    budget_bytes: int,
    journal: Journal,
    trace: Trace | None = None,
    costs: Costs | None = None,
    plan: Plan | None = None,
    policy: str = "",
    forecast: Forecast | None = None,
    bound_seconds: float = 0.0,
    manages: str = "",
    host_bytes: int | None = None,
    by: str = "kind",
    depth: int | None = None,
    sliced: Mapping[str, int] = MappingProxyType({}),
    inexact: Collection[str] = (),
) -> str:
    """Return the report of a room.

    Args:
        budget_bytes: budget on the device; 0 if unknown.
        journal: the steps so far; may be empty.
        trace, costs, plan, forecast: of the step; None if unknown.
        policy: name of the online policy, if the forecast is of a step without a plan.
        bound_seconds: lower bound on the step time of any plan within the budget; 0 if unknown.
        manages: storages that may leave the device: "activations" or "everything"; "" if unknown.
        host_bytes: as for `simulator.simulate.simulate`.
        sliced: how often each op ran in slices, by name.
        inexact: names of those whose slices changed the order of a sum.
        by: grouping of the table at the end: "kind" or "module".
        depth: levels of modules shown; None for as many as fit. Only for by="module".

    Raises:
        UsageError: there is no such table, or the depth is invalid.
        TraceError: costs, plan or forecast belong to another trace.
    """
    check_table(by, depth)
    if trace is not None:
        _check_match(trace, costs, plan, forecast)
    lines = [
        _title(budget_bytes, trace),
        "",
        *_describe_steps(journal, plan, policy, manages, 0 if trace is None else len(list_unused_state(trace))),
        *_describe_slices(sliced, inexact),
    ]
    plain = Lifetimes(trace).count_plain(costs) if trace is not None and costs is not None else []
    steady = find_steady(journal)
    if steady is not None or forecast is not None:
        lines += ["", *_compare(bound_seconds, steady, trace, costs, plan, forecast, plain)]
    lines += _describe_budget(budget_bytes, journal)
    if trace is not None and costs is not None and forecast is not None and forecast.live_bytes:
        lines += _draw_bytes(trace, costs, forecast, budget_bytes, plain)
        if plan is not None and by == "kind":
            lines += ["", *_describe_peak(trace, costs, plan, forecast)]
            if classes := count_state(trace, costs, plan, forecast, host_bytes):
                lines += ["", *tabulate_state(classes)]
    if by == "module":
        lines += ["", *_describe_modules(trace, costs, plan, forecast, depth)]
    return "\n".join(lines)


def _draw_bytes(
    trace: Trace, costs: Costs, forecast: Forecast, budget_bytes: int, plain_bytes: Sequence[int]
) -> list[str]:
    title = "Bytes on the device over the step, forecast (dots: if everything stayed; line: the budget)"
    begins = forecast.begin_seconds or count_seconds(trace, costs)
    chart = draw_chart(forecast.live_bytes, begins, budget_bytes=budget_bytes, plain_bytes=plain_bytes)
    return ["", *wrap(title), "", *chart]


def check_table(by: str, depth: int | None) -> None:
    """Check the name and the depth of a table.

    Raises:
        UsageError: the name is not one of `TABLES`, or the depth is below 1, or given for a table without levels.
    """
    if by not in TABLES:
        raise UsageError(f"a report is by {' or by '.join(TABLES)}, not by {by!r}")
    if depth is not None and (by != "module" or isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise UsageError(
            'depth is a number of levels of modules, at least 1, and belongs to a report by "module" (--by module)'
        )


def _describe_modules(
    trace: Trace | None, costs: Costs | None, plan: Plan | None, forecast: Forecast | None, depth: int | None
) -> list[str]:
    if trace is None or costs is None:
        return wrap("Bytes by module are known once a step has been captured.")
    return tabulate_modules(trace, costs, plan, None if plan is None else forecast, depth)


def _check_match(trace: Trace, costs: Costs | None, plan: Plan | None, forecast: Forecast | None) -> None:
    if costs is not None and not len(costs.op_seconds) == len(costs.workspace_bytes) == len(trace.ops):
        raise TraceError(f"costs of {len(costs.op_seconds)} ops do not fit {trace.name}, which has {len(trace.ops)}")
    if costs is not None and plan is not None and plan.trace_digest != costs.trace_digest:
        raise TraceError(f"the plan is for trace {plan.trace_digest[:12]}, the costs for {costs.trace_digest[:12]}")
    if forecast is not None and len(forecast.live_bytes) not in (0, trace.end):
        raise TraceError(
            f"a forecast of {len(forecast.live_bytes)} entries does not fit {trace.name}, which has {trace.end}: "
            "simulate the plan with this trace again"
        )


def _title(budget_bytes: int, trace: Trace | None) -> str:
    what = "Elbowroom" if trace is None else f"Elbowroom: {trace.name} on {trace.device}"
    return what + (f", within {format_bytes(budget_bytes)}" if budget_bytes else "")


def _describe_steps(journal: Journal, plan: Plan | None, policy: str, manages: str, unused: int) -> list[str]:
    counts = count_modes(journal)
    run = ", ".join(f"{count} {_MODES[mode]}" for mode, count in counts.items())
    lines = [f"Steps   {run or 'none run'}"]
    if policy:
        lines.append(f"Policy  {policy}: decides what moves as the step goes on")
    elif plan is None and (Mode.PLANNED in counts or Mode.PLAIN in counts):
        lines.append("Plan    not at hand")
    elif plan is None and Mode.DYNAMIC in counts:
        lines.append("Plan    none: what moves is decided while a step runs")
    elif plan is None:
        lines.append("Plan    none yet: a step is planned once it has been captured")
    elif not plan.decisions and not plan.state:
        lines.append(
            "Plan    what the step uses fits: none of it is moved or recomputed"
            if unused
            else "Plan    everything fits: nothing is moved, recomputed or hooked"
        )
    else:
        offloaded, recomputed = plan.count_gaps(Choice.OFFLOAD), plan.count_gaps(Choice.RECOMPUTE)
        decided = f"{_count(offloaded, 'gap')} offloaded, {recomputed} recomputed"
        decided += f" in {_count(len(plan.segments), 'segment')}"
        if plan.state:
            decided += f"; state: {_count(len(plan.state), 'gap')} offloaded"
        lines += wrap(f"Plan    {decided} (strategy {plan.strategy})", " " * 8)
    if unused:
        text = f"{_count(unused, 'block')} of state that the step does not use, if they can leave; not counted below"
        lines += wrap(f"Away    {text}", " " * 8)
    if manages:
        lines.append(f"Manages {manages}: {_MANAGED[manages]}")
    notes: dict[tuple[Mode, str], list[int]] = {}
    for record in journal.steps:
        if record.note:
            notes.setdefault((record.mode, record.note), []).append(record.step)
    for (mode, note), steps in list(notes.items())[:5]:
        which = ", ".join(map(str, steps[:4])) + (f" and {len(steps) - 4} more" if len(steps) > 4 else "")
        lines += wrap(f"Note    {_NOTES.get(mode, 'not all moved')} in step {which}: {note}", " " * 8)
    return lines


def _describe_slices(sliced: Mapping[str, int], inexact: Collection[str]) -> list[str]:
    if not sliced:
        return []
    counts = ", ".join(f"{shorten(name)} {count}" for name, count in sorted(sliced.items(), key=lambda item: -item[1]))
    lines = wrap(f"Slices  {counts}: ops that have no room as a whole, and how often they ran in slices", " " * 8)
    if inexact:
        names = ", ".join(sorted(map(shorten, inexact)))
        lines += wrap(
            f"Inexact {names}: slices change the order of sums; results are those of gradient accumulation over the "
            "same parts", " " * 8,
        )  # fmt: skip
    return lines


def _compare(
    bound_seconds: float,
    steady: Steady | None,
    trace: Trace | None,
    costs: Costs | None,
    plan: Plan | None,
    forecast: Forecast | None,
    plain: Sequence[int],
) -> list[str]:
    """Return rows of figures: of a step in which everything stays but ops are watched, of the plan, and measured."""
    rows = [("", "all kept", "forecast", "measured", "")]
    plain_peak = max(plain, default=0)
    peak, measured_peak = 0 if forecast is None else forecast.peak_bytes, None if steady is None else steady.peak_bytes
    share = f"{peak / plain_peak:.0%} of plain" if plain_peak and peak else ""
    rows.append(("peak", _bytes(plain_peak), _bytes(peak), _bytes(measured_peak), share))
    if steady is not None and steady.resident_bytes:
        rows.append(("resident memory", "", "", _bytes(steady.resident_bytes), "all of the process"))
    plain_seconds = 0.0
    if trace is not None and costs is not None and forecast is not None:
        plain_seconds = simulate(trace, costs, make_plain(costs)).step_seconds
    rows.append(
        ("step", _seconds(plain_seconds), _seconds(0 if forecast is None else forecast.step_seconds),
         _seconds(0 if steady is None else steady.seconds), _describe_timing(steady))
    )  # fmt: skip
    if forecast is not None and 0 < bound_seconds < math.inf:
        over = f"the forecast is {forecast.step_seconds / bound_seconds - 1:.1%} over it"
        rows.append(("lower bound", "", _seconds(bound_seconds), "", over))
    if forecast is not None:
        rows += _compare_moves(steady, plan, forecast)
    # Columns without any known figure are omitted.
    known = [column for column in (1, 2, 3) if any(row[column] not in ("", "-") for row in rows[1:])]
    return align([[row[0], *(row[column] for column in known), row[4]] for row in rows], "<" + ">" * len(known))


def _compare_moves(
    steady: Steady | None, plan: Plan | None, forecast: Forecast
) -> list[tuple[str, str, str, str, str]]:
    measured = steady if steady is not None and steady.mode is Mode.PLANNED else None
    rows = []
    if plan is None and forecast.evictions:
        rows.append(("evictions", "", str(forecast.evictions), "", "evicted, but needed again"))
    if forecast.offloaded_bytes:
        out = "" if measured is None else format_bytes(measured.offloaded_bytes)
        back = "" if measured is None else format_bytes(measured.reloaded_bytes)
        stalls = "" if measured is None else format_seconds(measured.stall_seconds)
        rows += [
            ("offloaded a step", "", format_bytes(forecast.offloaded_bytes), out, ""),
            ("reloaded a step", "", format_bytes(forecast.reloaded_bytes), back, ""),
            *_list_copies(forecast),
            ("stalls", "", format_seconds(forecast.stall_seconds), stalls, "waiting for moves"),
        ]
    segments = forecast.replays if plan is None else len(plan.segments)
    if segments:
        note = f"{format_seconds(forecast.recompute_seconds)} of replayed ops"
        replays = "" if measured is None else str(measured.recomputed)
        rows.append(("segments recomputed", "", str(segments), replays, note))
    return rows


def _list_copies(forecast: Forecast) -> list[tuple[str, str, str, str, str]]:
    """Return rows for the arenas of copies in the lower tiers, if they were laid out."""
    tiers = (("below the device", forecast.lower_tier_bytes, forecast.lower_arena_bytes),
             ("on the disk behind", forecast.disk_bytes, forecast.disk_arena_bytes))  # fmt: skip
    return [(name, "", format_bytes(arena), "", f"laid out; at most {format_bytes(most)} at once")
            for name, most, arena in tiers if arena]  # fmt: skip


def _describe_timing(steady: Steady | None) -> str:
    if steady is None:
        return ""
    return f"median of {_count(steady.steps, f'{_MODES[steady.mode]} step')}"


def _describe_budget(budget_bytes: int, journal: Journal) -> list[str]:
    """Say whether all measured steps stayed within their budgets, the first ones included."""
    if not budget_bytes:
        return []
    peaks = [
        (record.peak_bytes - (record.budget_bytes or budget_bytes), record.step)
        for record in journal.steps
        if record.peak_bytes is not None
    ]
    over = [(excess_bytes, step) for excess_bytes, step in peaks if excess_bytes > 0]
    if over:
        excess_bytes, step = max(over)
        beyond = format_bytes(excess_bytes)
        return ["", f"OVER BUDGET in {len(over)} of {len(peaks)} metered steps; worst in step {step}, by {beyond}"]
    return ["", f"Within budget in {_whole(len(peaks))}"] if peaks else []


def _whole(metered: int) -> str:
    return "the one step that was metered" if metered == 1 else f"all {metered} steps that were metered"


def _describe_peak(trace: Trace, costs: Costs, plan: Plan, forecast: Forecast) -> list[str]:
    """Explain the blocks at the peak."""
    blocks = explain_blocks(trace, costs, plan, forecast)
    index = Lifetimes(trace).op_at(forecast.peak_tick)
    place = "the beginning" if index is None else f"{shorten(trace.ops[index].name)}, op {index} of {len(trace.ops)}"
    held, away = [b for b in blocks if not b.is_away], [b for b in blocks if b.is_away]
    lines = [*wrap(f"Why each block is where it is, at the forecast peak ({place})"), ""]
    lines += _tabulate("on the device", held, MOST_HELD)
    if away:
        lines += ["", *_tabulate("away", away, MOST_AWAY)]
    return lines


def _tabulate(title: str, blocks: Sequence[BlockGroup], most: int) -> list[str]:
    rows = [(title, "count", "bytes", "decision", "why")]
    rows += [(b.what, str(b.count), format_bytes(b.nbytes), b.decision, b.reason) for b in blocks[:most]]
    if rest := blocks[most:]:
        count, nbytes = sum(block.count for block in rest), sum(block.nbytes for block in rest)
        rows.append((f"{len(rest)} other kinds", str(count), format_bytes(nbytes), "", ""))
    total = sum(block.nbytes for block in blocks)
    rows.append(("together", "", format_bytes(total), "", ""))
    return align(rows, "<>><", "  ")


def _bytes(nbytes: int | None) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"
