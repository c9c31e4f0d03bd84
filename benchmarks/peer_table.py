"""The table and the picture of `peers.py`, from its results."""

from __future__ import annotations

import pathlib
import statistics
from typing import Any

from peer_contenders import LABELS, find_role
from rich.console import Console
from rich.table import Table

from elbowroom.report.colours import MANAGED, PLAIN
from elbowroom.units import format_bytes

COLOURS = {
    "plain": PLAIN,
    "elbowroom": MANAGED,
    "elbowroom-inductor": "#e8837f",
    "checkpoint": "#2f6fb0",
    "selective": "#6baed6",
    "aot_eager": "#59a14f",
    "inductor": "#8c6d31",
    "save_on_cpu": "#a0a0a0",
    "files": "#edc948",
    "fsdp": "#b07aa1",
}
"""By role, as in all pictures; those of peers are fixed here."""
MARKERS = {"plain": "s", "elbowroom": "o", "elbowroom-inductor": "o", "inductor": "D", "aot_eager": "D"}
NEEDS_CUDA = ("'NoneType' object has no attribute 'type'", "only supports CUDA")
"""What peers say on a machine without an accelerator: torch.accelerator.current_accelerator() is None there."""

Model = dict[str, Any]


def list_front(survey: dict[str, Any]) -> list[str]:
    """Return the peers of a survey that no other beats in peak and seconds, from the smallest peak up."""
    done = [
        (found["peak_bytes"], min(found["seconds"]), peer) for peer, found in survey.items() if found.get("seconds")
    ]
    front = []
    fastest = float("inf")
    for _, seconds, peer in sorted(done):
        if seconds < fastest:
            fastest = seconds
            front.append(peer)
    return [peer for peer in front if peer != "plain"]


def is_ours(contender: str) -> bool:
    """Tell whether a contender is Elbowroom."""
    return contender.startswith("elbowroom")


def compare(heat: dict[str, Any], budget_bytes: int, key: str = "seconds", *, exact: bool = False) -> dict[str, Any]:
    """Return what a heat says of Elbowroom within a budget and the fastest peer with such a peak.

    Args:
        key: "seconds" or "processor_seconds".
        exact: whether peers with other bits than plain are left out.

    Returns:
        ours: median seconds, None if it failed; peer: the fastest, None if there is none; ratio: the median over
        rounds of the peer's over ours; compiled: the same over Elbowroom with inductor, None if that did not run.
    """
    found = heat["contenders"]
    medians = {name: statistics.median(each[key]) for name, each in found.items() if each[key]}
    peers = [
        name
        for name in medians
        if name != "plain"
        and not is_ours(name)
        and found[name]["peak_bytes"] <= budget_bytes
        and (found[name]["same_bits"] or not exact)
    ]
    ours, compiled = f"elbowroom:{budget_bytes}", f"elbowroom-inductor:{budget_bytes}"
    peer = min(peers, key=medians.__getitem__, default=None)

    def ratio(other: str) -> float | None:
        if peer is None or other not in medians:
            return None
        return statistics.median(a / b for a, b in zip(found[peer][key], found[other][key], strict=True))

    return {"ours": medians.get(ours), "peer": peer, "ratio": ratio(ours), "compiled": ratio(compiled)}


def say_outcome(found: dict[str, Any]) -> str:
    """Return the words for a contender that did not work, or for its bits."""
    if "failed" not in found:
        if found.get("same_bits"):
            return "same" if found.get("same_buffers") else "other buffers"
        return "other"
    if any(each in found["failed"] for each in NEEDS_CUDA):
        return "needs CUDA"
    return f"fails: {found['failed'][:60]}"


def print_tables(models: dict[str, Model]) -> None:
    """Print a table of the survey and one of the heats for each model, and the medians."""
    console = Console(width=130)
    for model in models.values():
        console.print(make_survey_table(model))
        if "heat" in model:
            console.print(make_heat_table(model))
    heats = [model["heat"] for model in models.values() if "heat" in model]
    for where, words in (("share", "at shares of the plain peak"), ("peer", "at the peaks of peers")):
        for exact in (False, True):
            for key in ("seconds", "processor_seconds"):
                found = [
                    compare(heat, target["budget_bytes"], key, exact=exact)["ratio"]
                    for heat in heats
                    for target in heat["targets"]
                    if where in target
                ]
                ratios = [each for each in found if each is not None]
                if ratios:
                    console.print(
                        f"{words}, {'peers with the same bits' if exact else 'all peers'}, {key}: fastest peer over "
                        f"Elbowroom in the median {statistics.median(ratios):.2f}, least {min(ratios):.2f}, "
                        f"{sum(each > 1 for each in ratios)} of {len(ratios)} above 1; "
                        f"no peer at {len(found) - len(ratios)}"
                    )


def make_survey_table(model: Model) -> Table:
    """Return a table of the configurations of all peers."""
    table = Table(title=f"{model['title']}: peers")
    for column in ("peer", "configuration", "peak", "of plain", "seconds", "bits"):
        table.add_column(column, justify="left" if column in ("peer", "configuration", "bits") else "right")
    plain = model["survey"].get("plain", {}).get("peak_bytes")
    for contender, found in model["survey"].items():
        figures = ["", "", ""]
        if found.get("seconds"):
            peak = found["peak_bytes"]
            figures = [format_bytes(peak), f"{peak / plain:.0%}" if plain else "", f"{min(found['seconds']):.2f}"]
        configuration = contender.partition(":")[2]
        table.add_row(LABELS[find_role(contender)], configuration, *figures, say_outcome(found))
    return table


def make_heat_table(model: Model) -> Table:
    """Return a table of Elbowroom beside the fastest peer at each peak."""
    table = Table(title=f"{model['title']}: within the same peak, side by side")
    columns = ("peak", "bytes", "plain", "Elbowroom", "its peak", "bits", "fastest peer", "ratio", "ratio, same bits",
               "ratio, processor", "ratio to inductor")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    heat = model["heat"]
    plain = statistics.median(heat["contenders"]["plain"]["seconds"])
    for target in sorted(heat["targets"], key=lambda target: -target["budget_bytes"]):
        budget = target["budget_bytes"]
        ours = heat["contenders"][f"elbowroom:{budget}"]
        every, exact = compare(heat, budget), compare(heat, budget, exact=True)
        processor = compare(heat, budget, "processor_seconds")
        table.add_row(
            f"{target['share']} %" if "share" in target else f"of {target['peer']}",
            format_bytes(budget),
            f"{plain:.2f} s",
            "fails" if every["ours"] is None else f"{every['ours']:.2f} s",
            "" if every["ours"] is None else f"{ours['peak_bytes'] / budget:.4f}",
            say_outcome(ours),
            every["peer"] or "no peer",
            *(write_ratio(each["ratio"]) for each in (every, exact, processor)),
            write_ratio(every["compiled"]),
        )
    return table


def write_ratio(ratio: float | None) -> str:
    """Return a ratio for the table."""
    return "-" if ratio is None else f"{ratio:.2f}"


def draw(models: dict[str, Model], path: pathlib.Path) -> None:
    """Plot seconds over peak for the contenders of each heat; at the foot, the peaks of all peers of the survey."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.8, 8.6), layout="constrained")
    shown: dict[str, Any] = {}
    for index, model in enumerate(models.values()):
        axes = figure.add_subplot(2, 3, index + 1)
        axes.grid(visible=True, color="#e4e4e4", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(model["title"], fontsize=10)
        axes.set(xlabel="measured peak, of the plain peak", ylabel="seconds per step, of plain")
        axes.xaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        for role, points in list_points(model).items():
            shown[role] = axes.plot(
                *zip(*sorted(points), strict=True), marker=MARKERS.get(role, "^"), color=COLOURS.get(role, "#000000"),
                linestyle="-" if is_ours(role) else "", markersize=7 if is_ours(role) else 6, label=LABELS[role],
                zorder=4 if is_ours(role) else 3,
            )[0]  # fmt: skip
        for role, peaks in list_survey_peaks(model).items():
            marks = axes.plot(peaks, [0.06] * len(peaks), marker="|", markersize=12, linestyle="", color=COLOURS[role])
            shown.setdefault(role, marks[0])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0, top=max(1.5, axes.get_ylim()[1]))
    order = [role for role in LABELS if role in shown]
    figure.legend(
        [shown[role] for role in order], [LABELS[role] for role in order], loc="outside lower center", ncols=4,
        frameon=False, fontsize=10,
    )  # fmt: skip
    with rc_context({"svg.hashsalt": "elbowroom", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def list_points(model: Model) -> dict[str, list[tuple[float, float]]]:
    """Return (peak, seconds) of the contenders of a heat over those of plain, by role."""
    if "heat" not in model:
        return {}
    found = model["heat"]["contenders"]
    plain = found["plain"]
    points: dict[str, list[tuple[float, float]]] = {}
    for name, each in found.items():
        if each["seconds"]:
            ratio = statistics.median(a / b for a, b in zip(each["seconds"], plain["seconds"], strict=True))
            points.setdefault(find_role(name), []).append((each["peak_bytes"] / plain["peak_bytes"], ratio))
    return points


def list_survey_peaks(model: Model) -> dict[str, list[float]]:
    """Return the peaks of the peers of a survey over that of plain, by role: their seconds are of another time."""
    survey = model["survey"]
    peaks: dict[str, list[float]] = {}
    for name, each in survey.items():
        if each.get("seconds") and name != "plain":
            peaks.setdefault(find_role(name), []).append(each["peak_bytes"] / survey["plain"]["peak_bytes"])
    return peaks
