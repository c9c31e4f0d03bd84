"""`elbowroom probe`: measures this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from elbowroom._folders import check_writable
from elbowroom.cli.parameters import Json, Output, SpillFolder
from elbowroom.cli.sources import measure_machine, save
from elbowroom.cli.terminal import open_terminal
from elbowroom.ir.files import to_json
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.units import format_bytes, format_seconds


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(probe)


def probe(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    output: Output = None,
    spill_folder: SpillFolder = None,
    as_json: Json = False,
) -> None:
    """Measure this machine: compute rates, memory, and the links between its tiers (about ten seconds)."""
    with open_terminal(as_json) as terminal:
        check_writable(output)
        profile = measure_machine(terminal, device=device, spill_folder=spill_folder, is_stored=False)
        written = save(profile, output)
        rates = Table("kind", "dtype", "rate", box=None, pad_edge=False, header_style="bold")
        for rate in profile.rates:
            rates.add_row(rate.kind, rate.dtype, format_rate(rate.kind, rate.per_second))
        terminal.show(Text(profile.name, style="bold"))
        terminal.show()
        terminal.show(rates)
        terminal.show()
        terminal.show(_tabulate_memory(profile))
        terminal.show(
            f"\nleast time of an op {format_seconds(profile.op_latency_seconds)}, "
            f"of a hook {format_seconds(profile.hook_seconds)}"
        )
        if written:
            terminal.show_text(f"written to {written}")
        terminal.write_document("probe", profile=to_json(profile), output=written)


def _tabulate_memory(profile: HardwareProfile) -> Table:
    names = ("tier", "bytes", "link", "out", "back", "latencies", "duplex")
    table = Table(*names, box=None, pad_edge=False, header_style="bold")
    links = {link.upper: link for link in profile.links}
    for tier in profile.tiers:
        link = links.get(tier.name)
        cells = () if link is None else (
            f"to {link.lower}",
            f"{format_bytes(link.out_bytes_per_second)}/s",
            f"{format_bytes(link.back_bytes_per_second)}/s",
            f"{format_seconds(link.out_latency_seconds)}, {format_seconds(link.back_latency_seconds)}",
            "half" if link.half_duplex else "full",
        )  # fmt: skip
        table.add_row(tier.name, format_bytes(tier.capacity_bytes), *cells)
    return table


def format_rate(kind: str, per_second: float) -> str:
    """Format a rate: bytes for elementwise ops, floating-point operations for others."""
    if kind == "elementwise":
        return f"{format_bytes(per_second)}/s"
    if per_second >= 1e12:
        return f"{per_second / 1e12:.1f} TFLOP/s"
    return f"{per_second / 1e9:.1f} GFLOP/s"
