"""`elbowroom capture`: writes the trace of one training step."""

from __future__ import annotations

import time

import typer

from elbowroom._folders import check_writable
from elbowroom.cli.parameters import Json, Output, Spec, WorkloadOptions, with_workload_options
from elbowroom.cli.sources import capture_spec, save
from elbowroom.cli.terminal import open_terminal
from elbowroom.units import format_bytes, format_seconds

_REMARKS = {
    "activation": "saved for backward",
    "temporary": "everything else the step makes; never all at once",
}


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command()(with_workload_options(capture))


def capture(
    spec: Spec,
    output: Output = None,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Capture one training step on fake tensors: nothing is computed, and no GPU is needed."""
    from elbowroom.ir.digest import digest

    with open_terminal(as_json) as terminal:
        check_writable(output)
        begin = time.perf_counter()
        trace = capture_spec(terminal, spec, options)
        seconds = time.perf_counter() - begin
        written = save(trace, output)
        by_role = {
            str(role): sum(storage.nbytes for storage in trace.storages if storage.role is role)
            for role in sorted({storage.role for storage in trace.storages})
        }
        movable_bytes = sum(trace.storages[storage].nbytes for storage in trace.movable)
        rows = [
            ("ops", str(len(trace.ops)), f"{sum(op.flops for op in trace.ops) / 1e9:.1f} GFLOP"),
            ("storages", str(len(trace.storages)), ""),
            ("saved for backward", str(len(trace.saves)), f"asked for {len(trace.needs)} times"),
            *((role.replace("_", " "), format_bytes(by_role[role]), _REMARKS.get(role, "")) for role in by_role),
            ("may be moved", format_bytes(movable_bytes), "saved for backward, and not changed afterwards"),
            ("captured in", format_seconds(seconds), ""),
        ]
        terminal.show_facts(f"{trace.name} on {trace.device}", rows)
        if written:
            terminal.show_text(f"written to {written}")
        terminal.write_document(
            "capture",
            name=trace.name,
            device=trace.device,
            digest=digest(trace),
            ops=len(trace.ops),
            flops=sum(op.flops for op in trace.ops),
            storages=len(trace.storages),
            saves=len(trace.saves),
            needs=len(trace.needs),
            bytes_by_role=by_role,
            movable_bytes=movable_bytes,
            seconds=seconds,
            output=written,
        )
