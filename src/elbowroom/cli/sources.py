"""From what a user types to the values the verbs take: traces, profiles, budgets, files."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from elbowroom.cli.terminal import Terminal
from elbowroom.errors import ElbowroomError, TraceError, UsageError
from elbowroom.ir import files
from elbowroom.ir.check import check, check_trace
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.plan import Plan
from elbowroom.ir.trace import Trace
from elbowroom.progress import announcing
from elbowroom.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from elbowroom.workloads import Workload

THIS_MACHINE = "this"


def find_trace(terminal: Terminal, source: str, options: Mapping[str, Any]) -> Trace:
    """The trace in a file, or of a workload.

    Raises:
        UsageError: there is no such file or workload, or options of a workload were given for a file.
        TraceError: the file is damaged, or the step cannot be captured on fake tensors.
    """
    if ":" in source and not os.path.exists(source):
        return capture_spec(terminal, source, options)
    if options:
        given = ", ".join("--" + name.replace("_", "-") for name in options)
        raise UsageError(f"{source} is a file: {given} can only be chosen when it is captured")
    return load_trace(source)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file, checked.

    Raises:
        UsageError: there is no such file.
        TraceError: it is damaged, newer, or not consistent with itself.
    """
    with announcing("reading a trace", str(path)):
        trace = files.load(Trace, path)
    try:
        check_trace(trace)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from error
    return trace


def capture_spec(terminal: Terminal, spec: str, options: Mapping[str, Any]) -> Trace:
    """Capture one step of a workload on fake tensors, without allocating the model where that is possible.

    Raises:
        UsageError: the spec or an option means nothing.
        TraceError: the step cannot be faked.
    """
    from elbowroom.api import capture

    with terminal.progress(f"capturing {spec}") as advance:
        workload = _build_fake(spec, options)
        if workload is not None:
            advance("one step on fake tensors", 0.3)
            try:
                return capture(workload.step, workload.model, workload.optimizer, name=spec)
            except TraceError:
                pass  # the model may be what does not go together with fake tensors, and not the step
        advance("building the model", 0.1)
        workload = build(spec, options)
        advance("one step on fake tensors", 0.5)
        return capture(workload.step, workload.model, workload.optimizer, name=spec)


def build(spec: str, options: Mapping[str, Any]) -> Workload:
    """A workload with real tensors.

    Raises:
        UsageError: the spec or an option means nothing.
    """
    from elbowroom import workloads

    return workloads.build(spec, **_place(spec, options))


def _place(spec: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a device, where that is ours to choose: somebody's own function has its own ideas."""
    from elbowroom import workloads

    is_ours = spec.partition(":")[0] in workloads.sources()
    return {"device": default_device(), **options} if is_ours else dict(options)


def _build_fake(spec: str, options: Mapping[str, Any]) -> Workload | None:
    """A workload whose tensors are all fake; None if it cannot be made so."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from elbowroom import workloads

    if spec.partition(":")[0] not in workloads.sources():
        return None  # somebody's own function may well load weights from a file
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return workloads.build(spec, **_place(spec, options))
    except ElbowroomError:
        raise
    except Exception:
        # Its initialisation looks at values. Whatever else may be wrong shows when it is built in earnest.
        return None


def default_device() -> str:
    """CUDA where there is any, otherwise the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def find_profile(
    terminal: Terminal, hardware: str, *, device: str = "auto", spill_folder: str | None = None
) -> HardwareProfile:
    """The profile that `--hardware` names.

    Raises:
        UsageError: there is no such file or shipped profile, or this machine cannot be measured.
        TraceError: the file is damaged or newer.
    """
    if hardware == THIS_MACHINE:
        from elbowroom.hardware.probe import probe

        with terminal.progress("measuring this machine", steady=False) as advance:
            return probe(device, spill_folder=spill_folder, progress=advance)
    if os.path.exists(hardware) or hardware.endswith((".json", ".gz")) or os.sep in hardware:
        return files.load(HardwareProfile, hardware)
    from elbowroom.hardware.shipped import load_shipped

    return load_shipped(hardware)


def find_costs(terminal: Terminal, trace: Trace, hardware: str, costs_file: pathlib.Path | None) -> Costs:
    """What a trace costs: as measured, from a file, or else priced for what `--hardware` names.

    Raises:
        UsageError: there is no such file or profile.
        TraceError: a file is damaged or newer, or the costs are those of another trace.
    """
    return find_costs_and_device(terminal, trace, hardware, costs_file)[0]


def find_costs_and_device(
    terminal: Terminal, trace: Trace, hardware: str, costs_file: pathlib.Path | None
) -> tuple[Costs, int | None]:
    """As `find_costs`, and the bytes of the device; None where a file of costs is all there is, which has no device.

    Raises:
        UsageError, TraceError: as for `find_costs`.
    """
    from elbowroom.ir.digest import digest

    if costs_file is None:
        profile = find_profile(terminal, hardware)
        return price_trace(terminal, trace, profile), count_bytes(profile)
    costs = files.load(Costs, costs_file)
    if costs.trace_digest != digest(trace):
        raise TraceError(f"{costs_file} has the costs of trace {costs.trace_digest[:12]}, not {digest(trace)[:12]}")
    if len(costs.op_seconds) != len(trace.ops):
        raise TraceError(f"{costs_file} has the costs of {len(costs.op_seconds)} ops; the trace has {len(trace.ops)}")
    named = None if hardware == THIS_MACHINE else find_profile(terminal, hardware)
    return costs, None if named is None else count_bytes(named)


def count_bytes(profile: HardwareProfile) -> int | None:
    """All the memory of a profile's device; None if it does not say."""
    return profile.tiers[0].capacity_bytes if profile.tiers else None


def load_plan(path: str | os.PathLike[str], trace: Trace) -> Plan:
    """The plan in a file, checked against the trace it is to be for.

    Raises:
        UsageError: there is no such file.
        TraceError: it is damaged, newer, or for another trace.
    """
    from elbowroom.ir.digest import digest

    plan = files.load(Plan, path)
    if plan.trace_digest != digest(trace):
        raise TraceError(f"{os.fspath(path)} is a plan for trace {plan.trace_digest[:12]}, not {digest(trace)[:12]}")
    try:
        check(trace, plan)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from error
    return plan


def price_trace(terminal: Terminal, trace: Trace, profile: HardwareProfile) -> Costs:
    """What a trace costs on a machine; says so where it was captured for another kind of device."""
    from elbowroom.cost.price import price

    if trace.device != profile.device:
        terminal.note(
            f"captured on {trace.device}, priced for {profile.name} ({profile.device}): some ops are others there"
        )
    return price(trace, profile)


def read_amount(option: str, text: str, *, device_bytes: int | None = None, peak_bytes: int | None = None) -> int:
    """The bytes that an option says.

    Args:
        device_bytes, peak_bytes: what "60%" and "60%peak" are shares of; None where that is not known.

    Raises:
        UsageError: it is not an amount of memory, or a share of what is not known.
    """
    try:
        return parse_bytes(text, device_bytes=device_bytes, peak_bytes=peak_bytes)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def check_amount(option: str, text: str) -> None:
    """Refuse what is no amount of memory before anything is captured or measured.

    Raises:
        UsageError: it is none, whatever the device and the step are.
    """
    read_amount(option, text, device_bytes=1 << 40, peak_bytes=1 << 40)


def note_share(terminal: Terminal, option: str, text: str, nbytes: int) -> None:
    """Say how many bytes a share is."""
    if "%" in text:
        whole = "the plain step's peak" if is_share_of_peak(text) else "the device"
        terminal.note(f"{option} {text}: {format_bytes(nbytes)} ({nbytes} bytes), a share of {whole}")


def is_share_of_peak(text: str) -> bool:
    """Whether a budget can only be told once the peak of the plain step is known."""
    return text.strip().lower().endswith("peak")


def read_host_memory(text: str | None) -> int | None:
    """The bytes that `--host-memory` says; None for any amount.

    Raises:
        UsageError: it is not an amount of memory.
    """
    if text is None or text.strip() == "0":  # nothing, which no other amount of memory may be
        return None if text is None else 0
    return read_amount("--host-memory", text)


def save(value: object, path: pathlib.Path | None) -> str | None:
    """Write a noun to a file, if there is one to write. Returns its name.

    Raises:
        UsageError: the folder is not there or not writable.
    """
    if path is None:
        return None
    try:
        files.save(value, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    return str(path)


def check_writable(*paths: pathlib.Path | None) -> None:
    """Refuse a result's file before the work is done, and not after it. Nothing is left in its folder.

    Raises:
        UsageError: its folder is not there or not writable, it is there and no regular file, or it is named twice.
    """
    given = [path for path in paths if path is not None]
    for index, path in enumerate(given):
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: {path.parent} is not a folder")
        if path.exists() and not path.is_file():
            raise UsageError(f"cannot write {path}: {'it is a folder' if path.is_dir() else 'it is no regular file'}")
        if path.resolve() in [other.resolve() for other in given[:index]]:
            raise UsageError(f"cannot write {path}: it is named for two results")
        try:
            # A file is the only proof: permissions say nothing to root, and nothing of what the system refuses.
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
        os.close(handle)
        os.unlink(temporary)


def keep_all(costs: Costs, budget_bytes: int) -> Plan:
    """The plan of a plain step: nothing moves."""
    return Plan(
        trace_digest=costs.trace_digest, strategy="keep_all", budget_bytes=budget_bytes, decisions=(), segments=()
    )
