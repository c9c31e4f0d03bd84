"""Turns command-line arguments into the values that the API takes: traces, profiles, budgets, files."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elbowroom.cli.terminal import Terminal
from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import ElbowroomError, TraceError, UsageError
from elbowroom.ir import files
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.forecast import Forecast
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.progress import announcing
from elbowroom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from elbowroom.workloads import Workload

THIS_MACHINE = "this"


def check_belongs(owner: str, hardware: str, costs_file: pathlib.Path | None) -> None:
    """Check that no costs are chosen where none are asked for.

    Args:
        owner: the option that is missing, with which they would be.

    Raises:
        UsageError: `--hardware` or `--costs` is given.
    """
    for option, is_given in (("--costs", costs_file is not None), ("--hardware", hardware != THIS_MACHINE)):
        if is_given:
            raise UsageError(f"{option} belongs to {owner}: leave it out, or add {owner}")


def find_trace(terminal: Terminal, source: str, options: Mapping[str, Any]) -> Trace:
    """Load a trace from a file, or capture it from a workload.

    Raises:
        UsageError: there is no such file or workload, or workload options were given for a file.
        TraceError: the file is damaged, or the step cannot be captured on fake tensors.
    """
    if is_spec(source):
        return capture_spec(terminal, source, options)
    if options:
        given = ", ".join("--" + name.replace("_", "-") for name in options)
        raise UsageError(f"{source} is a trace file: {given} can only be chosen when a trace is captured")
    return load_trace(source)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Load and check a trace from a file.

    Raises:
        UsageError: there is no such file.
        TraceError: the trace is damaged, of a newer format, or inconsistent.
    """
    with announcing("reading a trace", str(path)):
        trace = files.load(Trace, path)
    try:
        check_trace(trace)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from error
    return trace


def is_spec(source: str) -> bool:
    """Return True if a source names a workload, and not a file."""
    return ":" in source and not os.path.exists(source)


def capture_spec(terminal: Terminal, spec: str, options: Mapping[str, Any], budget_bytes: int | None = None) -> Trace:
    """Capture one step of a workload on fake tensors; the model is fake, too, where possible.

    Args:
        budget_bytes: capture the step as it runs within this budget if the model's state may leave.

    Raises:
        UsageError: the spec or an option is invalid.
        TraceError: the step cannot run on fake tensors.
    """
    from elbowroom.api import capture

    with terminal.progress(f"capturing {spec}") as advance:
        workload = _build_fake(spec, options)
        if workload is not None:
            advance("one step on fake tensors", 0.3)
            try:
                return capture(workload.step, workload.model, workload.optimizer, name=spec, memory_budget=budget_bytes)
            except TraceError:
                pass  # perhaps only the model's construction does not work on fake tensors
        advance("building the model", 0.1)
        workload = build(spec, options)
        advance("one step on fake tensors", 0.5)
        return capture(workload.step, workload.model, workload.optimizer, name=spec, memory_budget=budget_bytes)


def build(spec: str, options: Mapping[str, Any]) -> Workload:
    """Build a workload with real tensors.

    Raises:
        UsageError: the spec or an option is invalid.
    """
    from elbowroom import workloads

    return workloads.build(spec, **_place(spec, options))


def _place(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Add a default device to the options of a built-in source; a user's function chooses its own."""
    from elbowroom import workloads

    is_builtin = spec.partition(":")[0] in workloads.sources()
    return {"device": default_device(), **options} if is_builtin else dict(options)


def _build_fake(spec: str, options: Mapping[str, Any]) -> Workload | None:
    """Build a workload from fake tensors; None if that fails."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from elbowroom import workloads

    if spec.partition(":")[0] not in workloads.sources():
        return None  # a user's function may load weights from a file
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return workloads.build(spec, **_place(spec, options))
    except ElbowroomError:
        raise
    except Exception:
        # The initialisation reads values. Any other fault shows when the real model is built.
        return None


def has_torch() -> bool:
    """Tell whether PyTorch is installed, without importing it."""
    return importlib.util.find_spec("torch") is not None


def default_device() -> str:
    """Return "cuda" if available, otherwise "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def find_profile(
    terminal: Terminal, hardware: str, *, device: str = "auto", spill_folder: str | None = None
) -> HardwareProfile:
    """Return the profile that `--hardware` names.

    Raises:
        UsageError: there is no such file or shipped profile, or this machine cannot be measured.
        TraceError: the file is damaged or of a newer format.
    """
    if hardware == THIS_MACHINE:
        return measure_machine(terminal, device=device, spill_folder=spill_folder)
    if os.path.exists(hardware) or hardware.endswith((".json", ".gz")) or os.sep in hardware:
        return files.load(HardwareProfile, hardware)
    from elbowroom.hardware.shipped import load_shipped

    return load_shipped(hardware)


def measure_machine(
    terminal: Terminal, *, device: str, spill_folder: str | None, is_stored: bool | None = None
) -> HardwareProfile:
    """Return the profile of this machine.

    Args:
        is_stored: whether one that was measured within a day will do; by default as configured.

    Raises:
        UsageError: it cannot be measured.
    """
    from elbowroom.config import read_config
    from elbowroom.hardware.profile_store import load_or_probe

    is_enabled = read_config().profile_store if is_stored is None else is_stored
    with terminal.progress("measuring this machine", steady=False) as advance:
        return load_or_probe(device, spill_folder=spill_folder, progress=advance, is_enabled=is_enabled)


def find_costs(terminal: Terminal, trace: Trace, hardware: str, costs_file: pathlib.Path | None) -> Costs:
    """Return the costs of a trace: measured ones from a file, otherwise priced for the machine that `--hardware` names.

    Raises:
        UsageError: there is no such file or profile.
        TraceError: a file is damaged or of a newer format, or the costs belong to another trace.
    """
    return find_costs_and_device(terminal, trace, hardware, costs_file)[0]


def find_costs_and_device(
    terminal: Terminal, trace: Trace, hardware: str, costs_file: pathlib.Path | None
) -> tuple[Costs, int | None]:
    """Return `find_costs`, and the device's bytes: None if only a costs file is given, which names no device.

    Raises:
        UsageError, TraceError: see `find_costs`.
    """
    costs, profile = find_costs_and_profile(terminal, trace, hardware, costs_file)
    return costs, None if profile is None else count_bytes(profile)


def find_costs_and_profile(
    terminal: Terminal, trace: Trace, hardware: str, costs_file: pathlib.Path | None
) -> tuple[Costs, HardwareProfile | None]:
    """Return `find_costs`, and the profile: None if only a costs file is given.

    Raises:
        UsageError, TraceError: see `find_costs`.
    """
    from elbowroom.ir.digest import digest

    if costs_file is None:
        profile = find_profile(terminal, hardware)
        return price_trace(terminal, trace, profile), profile
    costs = files.load(Costs, costs_file)
    if costs.trace_digest != digest(trace):
        raise TraceError(
            f"{costs_file} holds the costs of trace {costs.trace_digest[:12]}, but this is {digest(trace)[:12]}"
        )
    if len(costs.op_seconds) != len(trace.ops):
        raise TraceError(
            f"{costs_file} holds the costs of {len(costs.op_seconds)} ops, but the trace has {len(trace.ops)}"
        )
    named = None if hardware == THIS_MACHINE else find_profile(terminal, hardware)
    return costs, named


def group_optimizer(
    terminal: Terminal, source: str, options: Mapping[str, Any], budget_bytes: int, profile: HardwareProfile
) -> tuple[Trace, Costs]:
    """Capture and price a workload as it runs within a budget that its state may have to leave.

    Raises:
        UsageError, TraceError: as `capture_spec`.
    """
    trace = capture_spec(terminal, source, options, budget_bytes)
    return trace, price_trace(terminal, trace, profile)


def count_bytes(profile: HardwareProfile) -> int | None:
    """Return the memory of a profile's device, in bytes; None if the profile does not say."""
    return profile.tiers[0].capacity_bytes if profile.tiers else None


def load_plan(path: str | os.PathLike[str], trace: Trace) -> Plan:
    """Load a plan from a file and check it against its trace.

    Raises:
        UsageError: there is no such file.
        TraceError: the plan is damaged, of a newer format, or for another trace.
    """
    from elbowroom.ir.digest import digest

    plan = files.load(Plan, path)
    if plan.trace_digest != digest(trace):
        raise TraceError(
            f"{os.fspath(path)} is a plan for trace {plan.trace_digest[:12]}, but this is {digest(trace)[:12]}"
        )
    try:
        check(trace, plan)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from error
    return plan


def price_trace(terminal: Terminal, trace: Trace, profile: HardwareProfile) -> Costs:
    """Price a trace for a machine, which may have measured some of its ops before.

    Notes how many, and if the trace was captured for another kind of device.
    """
    from elbowroom.config import read_config
    from elbowroom.cost.op_times import make_key
    from elbowroom.cost.price import price

    if trace.device != profile.device:
        terminal.note(
            f"captured on {trace.device}, with costs of {profile.name} ({profile.device}): some of its ops may differ"
        )
    past: Mapping[str, float] = {}
    if has_torch():  # times are stored for a version of it
        from elbowroom.hardware.past_times import PastTimes

        past = PastTimes(profile, is_enabled=read_config().op_time_store).load()
    if known := sum(make_key(op) in past for op in trace.ops) if past else 0:
        terminal.note(f"{known} of {len(trace.ops)} ops have times that this machine measured in earlier steps")
    return price(trace, profile, past=past)


def read_amount(option: str, text: str, *, device_bytes: int | None = None, peak_bytes: int | None = None) -> int:
    """Parse an option's amount of memory, in bytes.

    Args:
        device_bytes, peak_bytes: what "60%" and "60%peak" are shares of; None if unknown.

    Raises:
        UsageError: the text is not an amount of memory, or is a share of an unknown amount.
    """
    try:
        return parse_bytes(text, device_bytes=device_bytes, peak_bytes=peak_bytes)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def check_amount(option: str, text: str) -> None:
    """Check an amount of memory before the work starts.

    Raises:
        UsageError: the text is not an amount of memory for any device and step.
    """
    read_amount(option, text, device_bytes=1 << 40, peak_bytes=1 << 40)


def note_share(terminal: Terminal, option: str, text: str, nbytes: int) -> None:
    """Print how many bytes a share amounts to."""
    if "%" in text:
        whole = "the peak without a plan" if is_share_of_peak(text) else "device memory"
        terminal.note(f"{option} {text}: {format_bytes(nbytes)} ({nbytes} bytes), a share of {whole}")


def is_share_of_peak(text: str) -> bool:
    """Return True if a budget is a share of the peak without a plan."""
    return text.strip().lower().endswith("peak")


def read_host_memory(text: str | None) -> int | None:
    """Parse `--host-memory`, in bytes; None means unlimited.

    Raises:
        UsageError: the text is not an amount of memory.
    """
    if text is None or text.strip() == "0":  # parse_bytes refuses 0
        return None if text is None else 0
    return read_amount("--host-memory", text)


def save(value: object, path: pathlib.Path | None) -> str | None:
    """Write a value to `path` and return its name; do nothing if `path` is None.

    Raises:
        UsageError: the folder does not exist or is not writable.
    """
    if path is None:
        return None
    files.save(value, path)
    return str(path)


def check_host_memory(forecast: Forecast, host_bytes: int | None) -> None:
    """Check that the tier below the device has room for the copies of a plan.

    Raises:
        UsageError: it has not, and no disk takes the rest.
    """
    if host_bytes is not None and forecast.lower_tier_bytes > host_bytes:
        raise UsageError(
            f"--host-memory: the plan puts {forecast.lower_tier_bytes} bytes into the tier below the device, which may "
            f"hold {host_bytes}; a disk would take the rest only if it holds {count_least_host_bytes()}"
        )


def keep_all(costs: Costs, budget_bytes: int) -> Plan:
    """Return the plan of a plain step: every storage is kept."""
    return Plan(
        trace_digest=costs.trace_digest, strategy="keep_all", budget_bytes=budget_bytes, decisions=(), segments=()
    )
