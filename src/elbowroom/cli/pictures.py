"""Plots of results: step time over peak, throughput over batch size, blocks over time and address.

Needs matplotlib, an optional extra. Figures are written to a file, whose suffix chooses the format.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from elbowroom._folders import replacing
from elbowroom.errors import UsageError
from elbowroom.ir.buffers import Buffer, Layout
from elbowroom.planner.comparison.batches import Batches
from elbowroom.planner.comparison.strategies_compared import Comparison, find_front
from elbowroom.report.colours import BOUND, CLASS_COLOURS, MANAGED, PLAIN
from elbowroom.units import format_bytes, format_seconds

ENDINGS = (".svg", ".png", ".pdf")
MOST_VECTORS = 5000
"""Layouts with more blocks are drawn as pixels, also in vector formats."""

HIGHLIGHTED = "auto"
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
_MARKERS = "osD^vP<>Xhp"


def check_picture(path: Path | None) -> None:
    """Check early that a picture can be drawn, of a format that its suffix names.

    Raises:
        UsageError: matplotlib is not installed, or the suffix is not one of `ENDINGS`.
    """
    if path is None:
        return
    if path.suffix.lower() not in ENDINGS:
        raise UsageError(f"--picture: {path} must end in one of {', '.join(ENDINGS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--picture needs matplotlib, which is not installed; run: pip install 'elbowroom[pictures]'")


def draw_front(comparison: Comparison, path: Path) -> None:
    """Plot step time over peak for every plan, the Pareto front, and the lower bound.

    Raises:
        UsageError: the file cannot be written.
    """
    figure, axes = _open_figure()
    peak, plain = comparison.plain_peak_bytes, comparison.plain_seconds or 1.0
    front = [(entry.outcome.peak_bytes / peak, entry.outcome.over(plain)) for entry in find_front(comparison.entries)
             if entry.outcome is not None]  # fmt: skip
    if front:
        axes.step(*zip(*front, strict=True), where="post", color="#f3c9a5", linewidth=7, zorder=1, label="Pareto front")
    slowest = max((slowdown for _, slowdown in front), default=1.0)
    for index, strategy in enumerate(comparison.list_strategies()):
        points = sorted(
            (entry.outcome.peak_bytes / peak, entry.outcome.over(plain))
            for entry in comparison.find_entries(strategy=strategy)
            if entry.outcome is not None
        )
        if points:
            slowest = max(slowest, *(slowdown for _, slowdown in points))
            axes.plot(*zip(*points, strict=True), label=strategy, **_style(index, strategy))
    bounds = sorted({(entry.budget_bytes / peak, entry.bound_seconds / plain) for entry in comparison.entries
                     if entry.budget_bytes >= comparison.smallest_bytes})  # fmt: skip
    if bounds:
        axes.plot(*zip(*bounds, strict=True), color=BOUND, linestyle="--", linewidth=1.2, label="bound", zorder=4)
    smallest = f"smallest feasible: {format_bytes(comparison.smallest_bytes)}"
    axes.axvline(comparison.smallest_bytes / peak, color="#888888", linestyle=":", linewidth=1.2, label=smallest)
    axes.set_xlim(left=comparison.smallest_bytes / peak - 0.05)
    axes.set(
        xlabel=f"peak relative to the plain step ({format_bytes(peak)})",
        ylabel=f"step time relative to the plain step ({format_seconds(plain)})",
    )
    axes.set_title(f"{comparison.name} on {comparison.profile_name}", fontsize=11)
    axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    _scale_times(axes, slowest)
    _finish(figure, axes, path)


def draw_throughput(batches: Batches, title: str, path: Path) -> None:
    """Plot samples per second over batch size, with and without a plan, and mark the largest batch of each.

    Raises:
        UsageError: the file cannot be written.
    """
    figure, axes = _open_figure()
    curves = (
        (f"with Elbowroom ({batches.strategy})", MANAGED, "o", batches.largest, batches.fastest,
         [(each.batch, each.planned_rate) for each in batches.trials if each.planned_rate]),
        ("plain", PLAIN, "s", batches.largest_plain, batches.fastest_plain,
         [(each.batch, each.plain_rate) for each in batches.trials if each.fits_plain]),
    )  # fmt: skip
    for label, colour, marker, largest, fastest, points in curves:
        if largest is None or fastest is None:
            continue
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=label)
        best = max(points, key=lambda point: point[1])
        axes.plot(*best, color=colour, marker="*", markersize=14, linestyle="", label=f"fastest: {fastest.batch}")
        axes.axvline(
            largest.batch, color=colour, linestyle=":", linewidth=1.2, label=f"largest that fits: {largest.batch}"
        )
    axes.set(xlabel="batch size (samples)", ylabel="samples per second")
    axes.set_title(title, fontsize=11)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path)


def draw_layout(
    buffers: tuple[Buffer, ...],
    layout: Layout,
    title: str,
    path: Path,
    *,
    time_unit: str,
    classes: Mapping[int, str] = MappingProxyType({}),
) -> None:
    """Plot every block over time and address, with the lower bound; a block that wraps around is drawn at both ends.

    Args:
        time_unit: of the lifetimes.
        classes: class of each buffer, by its id. Buffers without one get colours that only tell neighbours apart.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.collections import PolyCollection

    figure, axes = _open_figure()
    unit, unit_bytes = next(
        (unit for unit in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)) if layout.arena_bytes >= unit[1]),
        ("bytes", 1),
    )
    end = max((max(buffer.lower + 1, buffer.upper) for buffer in buffers), default=1)
    corners, colours = [], []
    for index, (buffer, offset) in enumerate(zip(buffers, layout.offsets, strict=True)):
        low, high = offset / unit_bytes, (offset + buffer.nbytes) / unit_bytes
        wraps = buffer.upper < buffer.lower
        for left, right in ((buffer.lower, end), (0, buffer.upper)) if wraps else ((buffer.lower, buffer.upper),):
            corners.append(((left, low), (right, low), (right, high), (left, high)))
            colours.append(CLASS_COLOURS.get(classes.get(buffer.id, ""), _COLOURS[index % len(_COLOURS)]))
    blocks = PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.15, alpha=0.85)
    blocks.set_rasterized(len(corners) > MOST_VECTORS)
    axes.add_collection(blocks)
    bound = layout.bound_bytes / unit_bytes
    axes.axhline(bound, color="black", linestyle="--", linewidth=1, zorder=5, label=f"bound: {bound:.4g} {unit}")
    axes.axhline(layout.arena_bytes / unit_bytes, color=MANAGED, linewidth=1,
                 label=f"arena: {layout.arena_bytes / unit_bytes:.4g} {unit}")  # fmt: skip
    axes.set(
        xlabel=f"time ({time_unit})",
        ylabel=f"address ({unit})",
        xlim=(0, end),
        ylim=(0, layout.arena_bytes * 1.03 / unit_bytes),
    )
    for name, colour in CLASS_COLOURS.items():
        if name in classes.values():
            axes.plot([], [], linestyle="", marker="s", color=colour, label=name.replace("_", " "))
    axes.set_title(title, fontsize=11)
    _finish(figure, axes, path)


def _open_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(index: int, strategy: str) -> dict[str, Any]:
    """Return plot styles that tell the strategies apart; the default strategy stands out."""
    if strategy == HIGHLIGHTED:
        return {"color": MANAGED, "marker": "o", "markersize": 5, "linewidth": 2.2, "zorder": 5}
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "linestyle": "-" if index < len(_COLOURS) else "-.",
        "marker": _MARKERS[index % len(_MARKERS)],
        "markersize": 4,
        "linewidth": 1.1,
        "zorder": 3,
    }


def _scale_times(axes: Any, slowest: float) -> None:
    """Label the axis in multiples of the plain step; make it logarithmic if some plans are many times slower."""
    if slowest > 3:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.2, 1.5, 2, 3, 4, 5, 7)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(lambda slowdown, _: f"{slowdown:.3g} x")


def _finish(figure: Any, axes: Any, path: Path) -> None:
    """Write the figure; equal inputs give equal files."""
    from matplotlib import rc_context

    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    metadata = {} if path.suffix.lower() == ".png" else {"Creator": None} | (
        {"Date": None} if path.suffix.lower() == ".svg" else {"CreationDate": None}
    )  # fmt: skip
    with replacing(path) as part, rc_context({"svg.hashsalt": "elbowroom", "svg.fonttype": "none"}):
        figure.savefig(part, dpi=150, metadata=metadata, format=path.suffix[1:])
