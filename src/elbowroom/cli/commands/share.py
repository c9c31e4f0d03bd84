"""`elbowroom share`: runs the broker of a device, or simulates it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from elbowroom import _family
from elbowroom.cli.parameters import Json
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.errors import UsageError
from elbowroom.sharing import policies
from elbowroom.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from elbowroom.sharing.broker import BrokerOptions
    from elbowroom.sharing.simulation import SharedOutcome

_NAMES = _family.names(policies)


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("share")(share_device)


def share_device(
    device: Annotated[
        str, typer.Option("--device", help="cpu, cuda, cuda:N or the UUID of a card (nvidia-smi -L).")
    ] = "cpu",
    memory: Annotated[str | None, typer.Option("--memory", help="Bytes to lease: 70GiB, or 60% of a CPU's.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help=f"What shares the bytes out: {', '.join(_NAMES)}. With --simulate also a list, or all.",
            autocompletion=lambda: list(_NAMES),
        ),
    ] = "marginal",
    quantum: Annotated[
        float,
        typer.Option("--quantum", help="Seconds that a job waits until it is due, and that it runs at least."),
    ] = 30.0,
    heartbeat: Annotated[
        float, typer.Option("--heartbeat", help="Seconds without a word after which a job counts as silent.")
    ] = 10.0,
    end_silent: Annotated[
        float | None,
        typer.Option(
            "--end-silent",
            help="Kill the process of a job after so many silent seconds, so that its bytes come back. Default: its "
            "bytes count as taken until it speaks or ends.",
        ),
    ] = None,
    simulate: Annotated[
        Path | None, typer.Option("--simulate", metavar="JOBS.json", help="Run these jobs on a virtual clock.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Share a device among jobs that run with memory_budget="shared"; Ctrl-C ends the broker, not the jobs."""
    from elbowroom.sharing.broker import BrokerOptions

    with open_terminal(as_json) as terminal:
        if not 0 < quantum < float("inf") or not 0 < heartbeat < float("inf"):
            raise UsageError("--quantum and --heartbeat are seconds above 0")
        if end_silent is not None and not heartbeat <= end_silent < float("inf"):
            raise UsageError(f"--end-silent is at least the {heartbeat:g} s of --heartbeat, and finite")
        if simulate is not None:
            _simulate(terminal, simulate, memory, policy, quantum)
            return
        if memory is None:
            raise UsageError("--memory is missing: the bytes that all jobs together may hold")
        options = BrokerOptions(
            device_bytes=_read_memory(memory, device), policy=policy, quantum_seconds=quantum,
            heartbeat_seconds=heartbeat, end_seconds=end_silent,
        )  # fmt: skip
        _serve(terminal, device, options)


def _read_memory(memory: str, device: str) -> int:
    from elbowroom.tiers.host_memory import count_host_bytes

    try:
        return parse_bytes(memory, device_bytes=count_host_bytes() if device == "cpu" else None)
    except ValueError as error:
        raise UsageError(f"--memory: {error}") from error


def _serve(terminal: Terminal, device: str, options: BrokerOptions) -> None:
    import asyncio
    import logging

    from elbowroom.hardware.cards import find_card
    from elbowroom.sharing.broker import Broker
    from elbowroom.sharing.transport.address import find_address
    from elbowroom.sharing.transport.server import BrokerServer, serve_until_interrupted

    logging.basicConfig(level=logging.WARNING, format="elbowroom: %(message)s")
    address = find_address(device, card=find_card(device))

    nbytes = format_bytes(options.device_bytes)
    text = f"leasing {nbytes} of {address.device} on {address.socket}, policy {options.policy}"
    if address.device != "cpu" and not address.card:
        text += "; PyTorch finds no CUDA device here"

    async def serve() -> None:
        server = BrokerServer(Broker(options), address, tell_ready=lambda: terminal.note(text))
        await serve_until_interrupted(server)

    asyncio.run(serve())


def _simulate(terminal: Terminal, path: Path, memory: str | None, policy: str, quantum: float) -> None:
    from elbowroom.sharing.job_list import load_job_list
    from elbowroom.sharing.simulation import simulate_sharing

    jobs = load_job_list(path)
    if memory is not None:
        jobs = dataclasses.replace(jobs, device_bytes=_read_memory(memory, "cuda"))
    names = _NAMES if policy == "all" else tuple(policy.split(","))
    outcomes: list[SharedOutcome] = []
    with terminal.progress(f"simulating {len(jobs.jobs)} jobs") as advance:
        for place, name in enumerate(names):
            advance(name, place / len(names))
            outcomes.append(simulate_sharing(jobs, name, quantum_seconds=quantum))
    _show(terminal, path, outcomes)
    fields: dict[str, Any] = {"device_bytes": jobs.device_bytes, "policies": [dataclasses.asdict(each)
                                                                             for each in outcomes]}  # fmt: skip
    terminal.write_document("share", **fields)


def _show(terminal: Terminal, path: Path, outcomes: list[SharedOutcome]) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("policy", "makespan", "steps/s", "waiting", "slowdown", "fairness", "idle bytes", "pauses"):
        table.add_column(title, justify="left" if title == "policy" else "right", no_wrap=True)
    for each in outcomes:
        table.add_row(
            each.policy, format_seconds(each.makespan_seconds), f"{each.steps_per_second:.2f}",
            format_seconds(each.mean_waiting_seconds), f"{each.mean_slowdown:.2f}x", f"{each.fairness:.2f}",
            f"{each.idle_share:.0%}", str(sum(job.pauses for job in each.jobs)),
        )  # fmt: skip
    terminal.show(Text(f"{path}: {len(outcomes[0].jobs)} jobs; waiting and slowdown are means", style="bold"))
    terminal.show(table)
