"""`elbowroom jobs`: shows who has what on the shared devices."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elbowroom.cli.parameters import Json
from elbowroom.cli.terminal import open_terminal
from elbowroom.errors import UsageError
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.sharing.messages import StatusReply

SECONDS_BETWEEN_UPDATES = 1.0


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command("jobs")(show_jobs)


def show_jobs(
    device: Annotated[
        str | None,
        typer.Option("--device", help="cpu, cuda, cuda:N or the UUID of a card. Default: all with a broker."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the table once; it is live on a terminal otherwise.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the jobs of the shared devices: what each has and wants, and its slowdown relative to its fastest step."""
    with open_terminal(as_json) as terminal:
        found = _ask(device)
        terminal.write_document("jobs", brokers=[{"device": name, **_describe(reply)} for name, reply in found.items()])
        if as_json:
            return
        if once or not sys.stdout.isatty():
            terminal.show(_draw(found))
            return
        with Live(_draw(found), auto_refresh=False) as live:
            while True:
                time.sleep(SECONDS_BETWEEN_UPDATES)
                live.update(_draw(_ask(device)), refresh=True)


def _ask(device: str | None) -> dict[str, StatusReply]:
    from elbowroom.hardware.cards import find_card, name_card
    from elbowroom.sharing.transport.address import find_address, list_addresses
    from elbowroom.sharing.transport.client import ask_status

    if device is not None:
        return {(address := find_address(device, card=find_card(device))).device: ask_status(address)}
    found: dict[str, StatusReply] = {}
    errors = [UsageError("no device is shared: start a broker with `elbowroom share --device cpu --memory ...`")]
    for address in list_addresses():
        try:
            found[name_card(address.device)] = ask_status(address)
        except UsageError as error:  # of a broker that was killed, whose socket is still there
            errors.append(error)
    if not found:
        raise errors[-1]
    return found


def _describe(reply: StatusReply) -> dict[str, object]:
    fields = dataclasses.asdict(reply)
    del fields["sequence"]
    return fields


def _draw(found: dict[str, StatusReply]) -> RenderableType:
    parts: list[RenderableType] = []
    for device, reply in found.items():
        title = f"{device}: {format_bytes(reply.device_bytes)}, {format_bytes(reply.free_bytes)} free"
        if reply.outside_bytes:
            title += f", {format_bytes(reply.outside_bytes)} held by other programs"
        parts.append(Text(f"{title}; policy {reply.policy}", style="bold"))
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("job", overflow="ellipsis")
        for name in ("pid", "state", "has", "floor", "wants", "step", "slower", "steps"):
            table.add_column(name, justify="left" if name == "state" else "right", no_wrap=True)
        for job in reply.jobs:
            state = f"{job.state} {format_seconds(job.waiting_seconds)}" if job.waiting_seconds else job.state
            table.add_row(
                Text(job.name), str(job.pid), state, format_bytes(job.held_bytes), format_bytes(job.floor_bytes),
                format_bytes(job.wanted_bytes) if job.wanted_bytes else "?",
                format_seconds(job.step_seconds) if job.step_seconds else "", f"{1 + job.lost_share:.2f}x",
                str(job.steps),
            )  # fmt: skip
        parts.append(table)
    return Group(*parts)
