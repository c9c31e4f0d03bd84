"""Live view of a running script on the terminal: the budget, the peak, where the bytes are, and the seconds lost."""

from __future__ import annotations

import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elbowroom.planned_step import PlannedStep
from elbowroom.report.state import StateClass
from elbowroom.room import Room
from elbowroom.units import format_bytes, format_seconds

SECONDS_BETWEEN_DRAWINGS = 0.25


class LiveView:
    """Redraws a few lines below the script's own output, at the ends of steps.

    Args:
        console: by default stderr. Nothing is shown if it is no terminal.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = Console(file=sys.stderr) if console is None else console
        self._live: Live | None = None
        self._drawn = float("-inf")
        self._planned: PlannedStep | None = None
        self._state: tuple[StateClass, ...] = ()

    def update(self, room: Room) -> None:
        """Show the room's last step."""
        now = time.monotonic()
        if not self._console.is_terminal or now - self._drawn < SECONDS_BETWEEN_DRAWINGS:
            return
        self._drawn = now
        if self._live is None:
            # What the script prints is drawn above the view, but never leaves a file that it is redirected to.
            redirects = sys.stdout.isatty()
            self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=redirects)
            self._live.start()
        self._live.update(self._render(room), refresh=True)

    def close(self) -> None:
        """Remove the view from the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self, room: Room) -> Panel:
        planned = room.planned
        if planned is not self._planned:
            self._planned, self._state = planned, room.count_state()
        return render(room.metrics(), planned, self._state)


def render(metrics: dict[str, int | float | str], planned: PlannedStep | None, state: tuple[StateClass, ...]) -> Panel:
    """Return the view of a room's metrics.

    Args:
        state: of the planned step, from `Room.count_state`.
    """
    budget = int(metrics["budget_bytes"])
    peak = int(metrics.get("max_peak_bytes", 0))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    bar = ProgressBar(total=budget, completed=peak, width=30)
    table.add_row("memory", Group(Text(f"peak {format_bytes(peak)} of {format_bytes(budget)}"), bar))
    if planned is not None:
        table.add_row("at the peak", Text(_describe_peak(planned, state)))
    moved = f"{format_bytes(int(metrics['offloaded_bytes']))} out, {format_bytes(int(metrics['reloaded_bytes']))} back"
    table.add_row("moved", Text(f"{moved}, {metrics['recomputed_segments']} segments recomputed in the last step"))
    table.add_row("lost", Text(_describe_loss(metrics, planned)))
    seconds = format_seconds(float(metrics["step_seconds"]))
    title = Text(f"Elbowroom: step {metrics['step']} ({metrics['mode']}), {seconds}")
    return Panel(table, title=title, title_align="left", expand=False)


def _describe_peak(planned: PlannedStep, state: tuple[StateClass, ...]) -> str:
    there = [(each.name, each.device_bytes) for each in state if each.device_bytes]
    rest = planned.forecast.peak_bytes - sum(nbytes for _, nbytes in there)
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in (*there, ("activations, other", max(0, rest)))]
    if away := sum(each.host_bytes + each.disk_bytes for each in state):
        parts.append(f"below the device: {format_bytes(away)} of model state")
    return "; ".join(parts)


def _describe_loss(metrics: dict[str, int | float | str], planned: PlannedStep | None) -> str:
    total = float(metrics["total_step_seconds"])
    stalls = float(metrics["total_stall_seconds"])
    share = 100 * stalls / total if total else 0.0
    text = f"{format_seconds(stalls)} waiting for transfers ({share:.0f} % of {format_seconds(total)})"
    if planned is not None and planned.forecast.recompute_seconds:
        text += f"; {format_seconds(planned.forecast.recompute_seconds)} recomputing per step (forecast)"
    return text
