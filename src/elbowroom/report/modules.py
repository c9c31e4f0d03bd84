"""Bytes by module: at the forecast peak, and kept, offloaded and recomputed for the backward pass, as a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.labels import name_kind, name_module, shorten
from elbowroom.ir.lifetimes import Lifetimes
from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.trace import PERSISTENT_ROLES, STATE_ROLES, Storage, Trace
from elbowroom.report.columns import align, wrap
from elbowroom.units import format_bytes

MOST_ROWS = 28
"""Limit on the rows of a table of default depth."""

SMALL_SHARE = 0.005
"""Modules with less of the peak, and of each choice, share a row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBytes:
    """Bytes of one module.

    Attributes:
        path: as `Op.module`: "" for the model itself, None outside of modules.
        peak_bytes: on the device at the forecast peak, the workspace of the running op included.
        state_bytes: part of these: parameters, buffers, gradients and optimizer state.
        kept_bytes: saved for the backward pass and kept on the device.
        offloaded_bytes: saved and copied to the tier below; counted once per gap.
        recomputed_bytes: saved, dropped and recomputed; counted once per gap.
    """

    path: str | None
    peak_bytes: int = 0
    state_bytes: int = 0
    kept_bytes: int = 0
    offloaded_bytes: int = 0
    recomputed_bytes: int = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes that the module saves for its backward pass; counted once per gap if they leave."""
        return self.kept_bytes + self.offloaded_bytes + self.recomputed_bytes

    def list_figures(self) -> list[int]:
        """Return all byte counts, in the order of the columns."""
        return [self.peak_bytes, self.state_bytes, self.kept_bytes, self.offloaded_bytes, self.recomputed_bytes]


def count_by_module(
    trace: Trace, costs: Costs, plan: Plan | None = None, forecast: Forecast | None = None
) -> tuple[ModuleBytes, ...]:
    """Return the bytes of each module, submodules excluded, in the order of first call.

    Bytes at the peak beyond storages and workspace (replays, second copies) are not counted.

    Args:
        plan, forecast: None for the step without a plan.

    Cost: linear in the trace.
    """
    lifetimes = Lifetimes(trace, plan)
    peak_tick = _find_peak(lifetimes, costs, forecast)
    found: dict[str | None, dict[str, int]] = {op.module: {} for op in trace.ops}

    def add(path: str | None, name: str, nbytes: int) -> None:
        row = found.setdefault(path, {})
        row[name] = row.get(name, 0) + nbytes

    for storage in trace.storages:
        nbytes = -(-storage.nbytes // costs.alignment_bytes) * costs.alignment_bytes
        if lifetimes.is_there(storage.id, peak_tick):
            add(storage.module, "peak_bytes", nbytes)
            if storage.role in STATE_ROLES:
                add(storage.module, "state_bytes", nbytes)
        for name, count in _count_choices(lifetimes, storage).items():
            add(storage.module, name, count * nbytes)
    for op, workspace_bytes in zip(trace.ops, costs.workspace_bytes, strict=True):
        if op.tick == peak_tick:
            add(op.module, "peak_bytes", workspace_bytes)
    return tuple(ModuleBytes(path=path, **row) for path, row in found.items())


def _find_peak(lifetimes: Lifetimes, costs: Costs, forecast: Forecast | None) -> int:
    if forecast is not None:
        return forecast.peak_tick
    live = lifetimes.count_plain(costs)
    return max(range(len(live)), key=live.__getitem__, default=0)


def _count_choices(lifetimes: Lifetimes, storage: Storage) -> dict[str, int]:
    """Count how often one storage is kept, offloaded and recomputed."""
    decisions = lifetimes.decisions.get(storage.id, ())
    if decisions:
        offloads = sum(decision.choice is Choice.OFFLOAD for decision in decisions)
        return {"offloaded_bytes": offloads, "recomputed_bytes": len(decisions) - offloads}
    return {"kept_bytes": 1} if storage.id in lifetimes.gaps and storage.role not in PERSISTENT_ROLES else {}


# -- the tree ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Node:
    """Module with its submodules."""

    path: str
    figures: list[int] = dataclasses.field(default_factory=lambda: [0] * 5)
    inner: dict[str, _Node] = dataclasses.field(default_factory=dict)

    def add(self, names: Sequence[str], figures: Sequence[int]) -> None:
        """Add figures to the module at this path, and to its ancestors."""
        self.figures = [ours + theirs for ours, theirs in zip(self.figures, figures, strict=True)]
        if names:
            path = f"{self.path}.{names[0]}" if self.path else names[0]
            self.inner.setdefault(names[0], _Node(path)).add(names[1:], figures)

    def count_levels(self) -> int:
        """Return the depth of the tree below this module."""
        return 1 + max((each.count_levels() for each in self.inner.values()), default=-1)


def _list_rows(node: _Node, depth: int, limits: Sequence[float], level: int = 0) -> Iterator[tuple[str, list[int]]]:
    """Yield name and figures of all submodules down to a depth, with small ones combined."""
    small: list[_Node] = []
    for name, each in node.inner.items():
        if _is_small(each.figures, limits):
            small.append(each)
            continue
        yield "  " * level + name, each.figures
        if level + 1 < depth:
            yield from _list_rows(each, depth, limits, level + 1)
    figures = [sum(column) for column in zip(*(each.figures for each in small), strict=True)]
    if small and not _is_small(figures, limits):
        yield "  " * level + f"{len(small)} small modules", figures


def _choose_rows(root: _Node, depth: int | None, limits: Sequence[float]) -> tuple[list[tuple[str, list[int]]], int]:
    """Return the rows of a table, and its depth; by default the greatest with few enough rows."""
    deepest = max(1, root.count_levels())
    if depth is not None:
        return list(_list_rows(root, depth, limits)), min(depth, deepest)
    for chosen in range(deepest, 0, -1):
        rows = list(_list_rows(root, chosen, limits))
        if len(rows) <= MOST_ROWS:
            return rows, chosen
    largest = sorted(root.inner.values(), key=lambda each: -each.figures[0])[:MOST_ROWS]
    least = [max(limit, largest[-1].figures[0]) for limit in limits]
    return list(_list_rows(root, 1, least)), 1


def tabulate_modules(
    trace: Trace, costs: Costs, plan: Plan | None, forecast: Forecast | None, depth: int | None
) -> list[str]:
    """Return the lines of a table of bytes by module.

    Args:
        depth: levels of modules shown; None for as many as fit.
    """
    counted = count_by_module(trace, costs, plan, forecast)
    if all(each.path is None for each in counted):
        return wrap("Bytes by module are not known: this trace names no modules. Those of other systems do not.")
    root = _Node("")
    own = outside = [0] * 5
    for each in counted:
        figures = each.list_figures()
        if each.path:
            root.add(each.path.split("."), figures)
        elif each.path is None:
            outside = figures
        else:
            own = figures
    totals = [sum(column) for column in zip(root.figures, own, outside, strict=True)]
    limits = [max(1.0, SMALL_SHARE * total) for total in totals]
    rows, shown = _choose_rows(root, depth, limits)
    rest = 0 if forecast is None else max(0, forecast.peak_bytes - totals[0])
    totals[0] += rest
    others = ((name_module(""), own), ("outside of the model", outside), ("replays and copies", [rest, 0, 0, 0, 0]))
    rows += [(name, figures) for name, figures in others if not _is_small(figures, limits)]
    unit, unit_bytes = _choose_unit(totals[0])
    cells = [["module", "at peak", "state", "kept", "offloaded", "recomputed", ""]]
    cells += [
        [name, *(_spell(each, unit_bytes) for each in figures), ""] for name, figures in (*rows, ("together", totals))
    ]
    cells = _drop_empty(cells)
    lines = wrap(f"Bytes by module, in {unit}, at the forecast peak ({_describe_peak(trace, costs, plan, forecast)})")
    lines += ["", *align(cells, "<" + ">" * (len(cells[0]) - 2), "  "), ""]
    notes = _list_notes(counted, totals)
    if shown < root.count_levels():
        notes.append(f"{shown} of {root.count_levels()} levels of modules are shown; depth chooses how many.")
    for note in notes:
        lines += wrap(f"  {note}", "  ")
    return lines


def _drop_empty(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """Remove columns without any bytes."""
    last = len(rows[0]) - 1
    kept = [c for c in range(last + 1) if c in (0, 1, last) or any(row[c] != "-" for row in rows[1:])]
    return [[row[column] for column in kept] for row in rows]


def _describe_peak(trace: Trace, costs: Costs, plan: Plan | None, forecast: Forecast | None) -> str:
    lifetimes = Lifetimes(trace, plan)
    index = lifetimes.op_at(_find_peak(lifetimes, costs, forecast))
    if index is None:
        return "the beginning"
    op = trace.ops[index]
    where = "" if op.module is None else f" in {name_module(op.module)}"
    return f"{shorten(op.name)}{where}" + (f", {op.line}" if op.line else "")


def _list_notes(counted: Iterable[ModuleBytes], totals: Sequence[int]) -> list[str]:
    """Return notes that explain the columns and name the modules that save most."""
    state = "state, a part of it: parameters, gradients, optimizer state and buffers."
    saved = "kept, offloaded, recomputed: what a module saves for its backward pass."
    notes = [f"{state} {saved}"]
    peak_bytes, state_bytes = totals[:2]
    if 2 * state_bytes > peak_bytes:
        notes.append(
            f"State is {state_bytes / peak_bytes:.0%} of the peak: an optimizer with less state, fewer trainable "
            "parameters or a smaller dtype makes it less; a smaller batch does not."
        )
    kinds: dict[str, int] = {}
    for each in counted:
        if each.path is not None:
            kind = name_kind(each.path)
            kinds[kind] = kinds.get(kind, 0) + each.saved_bytes
    most = [(kind, nbytes) for kind, nbytes in sorted(kinds.items(), key=lambda each: -each[1])[:3] if nbytes]
    if most:
        named = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in most)
        notes.append(f"Of the {format_bytes(sum(totals[2:]))} that are saved, most is saved by {named}.")
    return notes


def _is_small(figures: Sequence[int], limits: Sequence[float]) -> bool:
    return all(figure < limit for figure, limit in zip(figures, limits, strict=True))


def _choose_unit(nbytes: int) -> tuple[str, int]:
    return ("KiB", 1 << 10) if nbytes < 10 << 20 else ("MiB", 1 << 20) if nbytes < 100 << 30 else ("GiB", 1 << 30)


def _spell(nbytes: int, unit_bytes: int) -> str:
    return f"{nbytes / unit_bytes:,.1f}" if nbytes else "-"
