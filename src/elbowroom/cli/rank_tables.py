"""Shows forecasts of several ranks: facts of one job, or a row for each number of ranks. 80 columns hold all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from elbowroom.cli.terminal import Terminal
from elbowroom.ir.parallelism import Parallelism, RanksForecast
from elbowroom.units import format_bytes, format_seconds


def show_ranks(
    terminal: Terminal, title: str, parallelism: Parallelism, forecast: RanksForecast, device_bytes: int | None
) -> None:
    """Print the forecast of one job.

    Args:
        device_bytes: memory of each rank's device; None if unknown.
    """
    step_seconds = forecast.step_seconds
    rows = [
        (
            "step",
            format_seconds(step_seconds),
            f"one device's share of the work: {format_seconds(forecast.alone_seconds)}",
        ),
        ("efficiency", f"{forecast.efficiency:.1%}", "throughput per rank, relative to one device"),
        (
            "waits for the network",
            format_seconds(forecast.exposed_seconds),
            f"of {format_seconds(forecast.network_seconds)} of collectives",
        ),
    ]
    if forecast.stages:
        share = forecast.bubble_seconds / step_seconds if step_seconds else 0.0
        rows.append(("waits for other stages", format_seconds(forecast.bubble_seconds), f"{share:.1%} of the step"))
    rows.append(
        ("memory per rank", format_bytes(forecast.peak_bytes), _describe_fit(forecast.peak_bytes, device_bytes))
    )
    rows.append(("sent a rank", format_bytes(forecast.sent_bytes), ""))
    for total in forecast.collectives:
        rows.append(
            (
                total.kind.replace("_", "-"),
                format_seconds(total.seconds),
                f"{total.count} of {format_bytes(total.nbytes)} together",
            )
        )
    terminal.show_facts(f"{title}, {parallelism.ranks} ranks, {parallelism.kind}", rows)
    if forecast.stages:
        terminal.show(_list_stages(forecast))


def show_scaling(
    terminal: Terminal, title: str, kind: str, forecasts: Sequence[RanksForecast], device_bytes: int | None
) -> None:
    """Print a row for each number of ranks."""
    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "step", "efficiency", "waits for network", "memory per rank"):
        table.add_column(name, justify="right", no_wrap=True)
    for forecast in forecasts:
        too_large = device_bytes is not None and forecast.peak_bytes > device_bytes
        table.add_row(
            str(forecast.ranks),
            format_seconds(forecast.step_seconds),
            f"{forecast.efficiency:.1%}",
            format_seconds(forecast.exposed_seconds),
            format_bytes(forecast.peak_bytes) + (" !" if too_large else ""),
        )
    terminal.show(Text(f"{title}, {kind}", style="bold"), table)
    if any(device_bytes is not None and forecast.peak_bytes > device_bytes for forecast in forecasts):
        terminal.show(Text(f"! more than the device's {format_bytes(device_bytes or 0)}"))


def _describe_fit(peak_bytes: int, device_bytes: int | None) -> str:
    if device_bytes is None:
        return "at most"
    fits = "at most, of" if peak_bytes <= device_bytes else "more than"
    return f"{fits} the device's {format_bytes(device_bytes)}"


def _list_stages(forecast: RanksForecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("blocks", overflow="ellipsis", no_wrap=True, max_width=22)
    for name in ("forward", "backward", "alive", "passes on", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, stage in enumerate(forecast.stages):
        table.add_row(
            str(number),
            stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last.rpartition('.')[2]}",
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds),
            str(stage.alive),
            format_bytes(stage.sent_bytes),
            format_bytes(stage.peak_bytes),
        )
    return table
