"""`elbowroom run`: trains a workload, or runs a script of one's own, within a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elbowroom._family import get, names
from elbowroom._folders import check_writable
from elbowroom.cli.parameters import (
    Budget,
    Hardware,
    Json,
    ManagedByRoom,
    ScriptOrSpec,
    SpillFolder,
    Strategy,
    WorkloadOptions,
    check_positive,
    with_workload_options,
)
from elbowroom.cli.sources import (
    build,
    check_amount,
    find_profile,
    is_share_of_peak,
    keep_all,
    note_share,
    price_trace,
    read_amount,
    save,
)
from elbowroom.cli.terminal import Terminal, open_terminal
from elbowroom.config import CHOICES
from elbowroom.errors import UsageError
from elbowroom.ir.files import to_json, version_of
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.planner.options import find_managed, find_strategy
from elbowroom.residency import policies
from elbowroom.scripts.request import names_script, read_request
from elbowroom.scripts.script import run_script
from elbowroom.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from elbowroom.room import Room
    from elbowroom.workloads import Workload

_MODE_HELP = "auto (the default) plans; dynamic decides in every step as it goes on."
_POLICY_HELP = f"Decides in dynamic steps: {', '.join(names(policies))}."
_SCRIPT = "elbowroom.script"
"""Key of a script's command line in the context of a command."""

_FILE_HELP = "Write the {} to this file, for `elbowroom report`."


class RunCommand(typer.core.TyperCommand):
    """Command that runs a script if its arguments name one; otherwise a workload."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave the arguments of a script to the script."""
        if not names_script(args):
            return super().parse_args(ctx, args)
        ctx.meta[_SCRIPT] = tuple(args)
        return []

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Raises:
            typer.Exit: with the exit code of a script.
        """
        if _SCRIPT not in ctx.meta:
            return super().invoke(ctx)
        request = read_request(ctx.meta[_SCRIPT], program="elbowroom run")
        raise typer.Exit(run_script(request))


def register(app: typer.Typer) -> None:
    """Add this command to the program."""
    app.command(cls=RunCommand)(with_workload_options(run))


def run(
    spec: ScriptOrSpec,
    budget: Budget,
    steps: Annotated[
        int, typer.Option("--steps", callback=check_positive, help="How many; the first ones are captured.")
    ] = 8,
    ahead: Annotated[bool, typer.Option("--ahead", help="Plan before the first step, on fake tensors.")] = False,
    hardware: Hardware = "this",
    strategy: Strategy = "auto",
    mode: Annotated[str | None, typer.Option("--mode", help=_MODE_HELP)] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help=_POLICY_HELP, autocompletion=lambda: list(names(policies)))
    ] = None,
    manages: ManagedByRoom = None,
    spill_folder: SpillFolder = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_FILE_HELP.format("journal"))] = None,
    save_trace: Annotated[Path | None, typer.Option("--save-trace", help=_FILE_HELP.format("trace"))] = None,
    save_plan: Annotated[Path | None, typer.Option("--save-plan", help=_FILE_HELP.format("plan"))] = None,
    save_costs: Annotated[Path | None, typer.Option("--save-costs", help=_FILE_HELP.format("costs"))] = None,
    *,
    options: WorkloadOptions,
    as_json: Json = False,
) -> None:
    """Run a script unchanged within a budget, or train a named model for some steps. Exit code 3 if no plan fits.

    With a script instead of a SPEC, run it unchanged within a budget:
    elbowroom run --memory-budget 20GiB train.py ARGUMENTS (its options: python -m elbowroom.run --help).

    Ctrl-C, or a step that fails, ends the run: the steps before it are reported and written.
    """
    with open_terminal(as_json) as terminal:
        _check_mode(mode, policy, strategy=strategy, ahead=ahead, files=(save_trace, save_plan, save_costs))
        check_writable(output, save_trace, save_plan, save_costs)
        check_amount("--budget", budget)
        if manages is not None:
            find_managed(strategy, manages)
        find_strategy(strategy)
        with terminal.progress(f"building {spec}"):
            workload = build(spec, options)
        profile = _find_profile(terminal, workload, hardware, spill_folder)
        budget_bytes = _find_budget(terminal, workload, budget, profile)
        room, losses, stopped = _train(
            terminal, workload, budget_bytes, steps,
            ahead=ahead, profile=profile, strategy=strategy, spill_folder=spill_folder, mode=mode, policy=policy,
            manages=manages,
        )  # fmt: skip
        if stopped is None or room.journal().steps:
            # Write the journal first, since the rest takes time and Ctrl-C may come again.
            written = _save_run(room, output)
            if room.planned is not None:
                save(room.planned.trace, save_trace)
                save(room.planned.plan, save_plan)
                save(room.planned.costs, save_costs)
            fields = {**_list_fields(room, workload, losses), "complete": stopped is None}
            terminal.show_text(fields["report"])
            if written:
                terminal.show_text(f"\nwritten to {written}")
            terminal.write_document("run", name=spec, **fields, output=written)
        if stopped is not None:
            raise stopped


def _check_mode(
    mode: str | None, policy: str | None, *, strategy: str, ahead: bool, files: Sequence[Path | None]
) -> None:
    """Check the options before anything is built."""
    if mode not in (None, *CHOICES["mode"]):
        raise UsageError(f"--mode {mode}: there are: {', '.join(CHOICES['mode'])}")
    if policy is not None:
        get(policies, policy, "Policy")
        if mode != "dynamic":
            raise UsageError("--policy only applies without plans: add --mode dynamic")
    if mode == "dynamic" and (ahead or strategy != "auto" or any(files)):
        raise UsageError(
            "--mode dynamic plans nothing: leave out --ahead, --strategy, --save-trace, --save-plan and --save-costs"
        )


def _find_profile(terminal: Terminal, workload: Workload, hardware: str, spill_folder: str | None) -> HardwareProfile:
    """Return the profile to plan with, for the type of the model's device."""
    from elbowroom.api import find_device

    device = find_device(workload.model)
    profile = find_profile(terminal, hardware, device=str(device), spill_folder=spill_folder)
    if profile.device != device.type:
        raise UsageError(f"--hardware: {profile.name} is {profile.device}, and the step runs on {device}")
    return profile


def _find_budget(terminal: Terminal, workload: Workload, budget: str, profile: HardwareProfile) -> int:
    """Return a budget in bytes: shares are of this device, or of the forecast plain peak, which needs a capture."""
    from elbowroom.api import capture, find_device
    from elbowroom.hardware.memory import count_device_bytes
    from elbowroom.simulator.simulate import simulate

    device_bytes, peak_bytes = count_device_bytes(find_device(workload.model)), None
    if is_share_of_peak(budget):
        with terminal.progress("capturing one step on fake tensors"):
            trace = capture(workload.step, workload.model, workload.optimizer, name=workload.name)
        costs = price_trace(terminal, trace, profile)
        peak_bytes = simulate(trace, costs, keep_all(costs, 0)).peak_bytes
    budget_bytes = read_amount("--budget", budget, device_bytes=device_bytes, peak_bytes=peak_bytes)
    note_share(terminal, "--budget", budget, budget_bytes)
    return budget_bytes


def _train(
    terminal: Terminal, workload: Workload, budget_bytes: int, steps: int, *, ahead: bool, **fitting: Any
) -> tuple[Room, list[float], BaseException | None]:
    """Run the steps. Return the detached room, the losses, and the error that ended the run early."""
    from elbowroom.api import fit

    title = f"{workload.name} within {format_bytes(budget_bytes)}"
    losses: list[float] = []
    with terminal.progress(title, steady=False) as advance:
        if ahead:
            advance("planning ahead", 0.0)
        fitting["step"] = workload.step if ahead else None
        room = fit(workload.model, workload.optimizer, budget_bytes, **fitting)
        try:
            for step in range(steps):
                begin = time.perf_counter()
                with room.step():
                    loss = workload.step()
                losses.append(float(loss))
                seconds = format_seconds(time.perf_counter() - begin)
                mode = room.journal().steps[-1].mode
                advance(f"step {step + 1} of {steps} ({mode}), loss {losses[-1]:.4f}, {seconds}", (step + 1) / steps)
        except BaseException as error:
            stopped: BaseException | None = error
        else:
            stopped = None
        finally:
            room.detach()
    return room, losses, stopped


def _save_run(room: Room, path: Path | None) -> str | None:
    """Write a run and return the name of the file; do nothing if `path` is None."""
    if path is None:
        return None
    try:
        room.save_run(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return str(path)


def _list_fields(room: Room, workload: Workload, losses: Sequence[float]) -> dict[str, Any]:
    """Return the fields of the JSON document for a room's steps."""
    journal, planned = room.journal(), room.planned
    return {
        "device": str(next(workload.model.parameters()).device),
        "budget_bytes": room.budget_bytes,
        **_show_losses(losses),
        "forecast": None if planned is None else _summarize_forecast(to_json(planned.forecast)),
        "journal": to_json(journal),
        "journal_version": version_of(type(journal)),
        "manages": room.config.manages,
        "state": to_json(room.count_state()),
        "report": room.report(),
    }


def _show_losses(losses: Sequence[float]) -> dict[str, Any]:
    """Return the losses as JSON numbers (null if not finite), and bit for bit in hexadecimal."""
    return {
        "losses": [loss if math.isfinite(loss) else None for loss in losses],
        "losses_hex": [loss.hex() for loss in losses],
    }


def _summarize_forecast(forecast: dict[str, Any]) -> dict[str, Any]:
    """Return the forecast without its per-tick figures."""
    return {name: value for name, value in forecast.items() if name not in ("live_bytes", "begin_seconds")}
