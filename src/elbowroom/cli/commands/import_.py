"""`elbowroom import`: converts another system's log into a trace and measured costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from elbowroom._folders import check_writable
from elbowroom.cli.parameters import Json, Output
from elbowroom.cli.sources import find_profile, keep_all, save
from elbowroom.cli.terminal import open_terminal
from elbowroom.errors import UsageError
from elbowroom.importers import LoggedRelease, list_formats
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile, Link
from elbowroom.ir.trace import Trace
from elbowroom.units import format_bytes, format_seconds


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("import")(import_log)


def import_log(
    log_format: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT",
            help="dtr (operator logs of JSON lines) or g10 (a kernels.config).",
            autocompletion=lambda: list(list_formats()),
        ),
    ],
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The log.")],
    output: Output = None,
    costs_file: Annotated[
        Path | None, typer.Option("--costs", help="Write the measured costs to this file, for --costs of plan.")
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            help="Machine whose link is used for moves, which logs do not name; values as for plan. Default: the "
            "machine of the format's public logs.",
        ),
    ] = None,
    release: Annotated[
        LoggedRelease, typer.Option("--release", help="When a block is considered freed.", case_sensitive=False)
    ] = LoggedRelease.PROGRAM,
    as_json: Json = False,
) -> None:
    """Import the log of one step of another system, with its op times, to plan and simulate it here."""
    from elbowroom.importers import read_log
    from elbowroom.simulator.simulate import simulate

    with open_terminal(as_json) as terminal:
        check_writable(output, costs_file, inputs=(path,))
        link = None if hardware is None else top_link(find_profile(terminal, hardware))
        with terminal.progress(f"reading {path}"):
            imported = read_log(log_format, path, release=release, link=link)
        trace, costs = imported.trace, imported.costs
        plain = simulate(trace, costs, keep_all(costs, 0))
        written, written_costs = save(trace, output), save(costs, costs_file)
        found = describe(trace, plain)
        rows = [
            ("ops", str(found["ops"]), ""),
            ("storages", str(found["storages"]), f"may move in {found['needs']} gaps"),
            ("may be moved", format_bytes(found["movable_bytes"]), "never all at once"),
            ("plain peak", format_bytes(plain.peak_bytes), f"{plain.peak_bytes} bytes, if everything stays"),
            ("plain step", format_seconds(plain.step_seconds), "as logged"),
        ]
        terminal.show_facts(f"{trace.name}, imported from {log_format}", rows)
        for name in filter(None, (written, written_costs)):
            terminal.show_text(f"written to {name}")
        terminal.write_document(
            "import", format=log_format, digest=costs.trace_digest, **found, output=written, costs=written_costs
        )


def describe(trace: Trace, plain: Forecast) -> dict[str, Any]:
    """Describe the imported trace, and its step without a plan."""
    return {
        "name": trace.name,
        "ops": len(trace.ops),
        "storages": len(trace.storages),
        "saves": len(trace.saves),
        "needs": len(trace.needs),
        "movable_bytes": sum(trace.storages[storage].nbytes for storage in trace.movable),
        "plain_peak_bytes": plain.peak_bytes,
        "plain_step_seconds": plain.step_seconds,
    }


def top_link(profile: HardwareProfile) -> Link:
    """Return the link below the device.

    Raises:
        UsageError: there is none.
    """
    if not profile.links:
        raise UsageError(
            f"profile {profile.name!r} has no link to a tier below the device; measure the machine again with "
            "`elbowroom probe`"
        )
    return profile.links[0]
