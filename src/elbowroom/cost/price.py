"""Computes Costs from a Trace and a HardwareProfile, and from Measurements if there are any."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from elbowroom.cost.op_times import is_plausible, make_key
from elbowroom.cost.roofline import Rates, estimate_seconds, index_rates
from elbowroom.cost.workspace import estimate_workspace
from elbowroom.errors import TraceError
from elbowroom.ir.arguments import check_kinds
from elbowroom.ir.costs import Costs, Measurements
from elbowroom.ir.digest import digest
from elbowroom.ir.hardware import HardwareProfile, Link
from elbowroom.ir.trace import Op, Trace


def price(
    trace: Trace,
    profile: HardwareProfile,
    measurements: Measurements | None = None,
    *,
    trace_digest: str | None = None,
    past: Mapping[str, float] | None = None,
) -> Costs:
    """Return the seconds and the workspace of every op of a trace on a machine, and the links for its storages.

    Without measurements, times come from earlier steps or else from the profile's roofline, and workspaces from rules
    that are never below what was measured on a CPU. With measurements every op costs what was measured, even 0.

    Args:
        measurements: measurements of this trace on this machine.
        trace_digest: `ir.digest.digest(trace)`, if already known; computed otherwise.
        past: seconds of ops in earlier steps on this machine, by key (`cost.op_times.make_key`). Implausible ones are
            ignored.

    Raises:
        UsageError: there is no trace, or no profile (`load_shipped` returns one by its name).
        TraceError: the measurements belong to another trace or are not numbers of at least 0; or the profile has no
            link or no usable rates.

    Cost: linear in the trace; mostly the digest, about 10 ms per thousand ops.
    """
    check_kinds(trace=(trace, Trace), profile=(profile, HardwareProfile))
    link, *further_links = _find_links(profile)
    if measurements is None:
        rates = index_rates(profile)
        op_seconds = tuple(_predict_seconds(op, trace, rates, profile, past or {}) for op in trace.ops)
        cuda_rates = rates if profile.device.startswith("cuda") else None
        workspace_bytes = tuple(estimate_workspace(op, cuda_rates, isa=profile.isa) for op in trace.ops)
        overhead_seconds = 0.0
    else:
        _check_measurements(trace, measurements)
        op_seconds, workspace_bytes = measurements.op_seconds, measurements.workspace_bytes
        outside = measurements.step_seconds - measurements.stall_seconds - math.fsum(op_seconds)
        overhead_seconds = max(0.0, outside)
    return Costs(
        trace_digest=digest(trace) if trace_digest is None else trace_digest,
        profile_name=profile.name,
        op_seconds=op_seconds,
        workspace_bytes=workspace_bytes,
        link=link,
        further_links=tuple(further_links),
        alignment_bytes=profile.alignment_bytes,
        hook_seconds=profile.hook_seconds,
        overhead_seconds=overhead_seconds,
        measured=measurements is not None,
    )


def correct(costs: Costs, seconds: float) -> Costs:
    """Return costs of a step that takes `seconds` more (or fewer, if negative).

    The difference goes to the overhead outside of ops. If the overhead would become negative, all ops are scaled down.
    """
    overhead_seconds = costs.overhead_seconds + seconds
    if overhead_seconds >= 0:
        return dataclasses.replace(costs, overhead_seconds=overhead_seconds)
    ops = math.fsum(costs.op_seconds)
    share = max(0.0, 1 + overhead_seconds / ops) if ops else 1.0
    return dataclasses.replace(costs, op_seconds=tuple(share * each for each in costs.op_seconds), overhead_seconds=0.0)


def _predict_seconds(op: Op, trace: Trace, rates: Rates, profile: HardwareProfile, past: Mapping[str, float]) -> float:
    estimate = estimate_seconds(op, trace.storages, rates, profile)
    measured = past.get(make_key(op)) if past else None
    return measured if measured is not None and is_plausible(measured, estimate) else estimate


def _find_links(profile: HardwareProfile) -> tuple[Link, ...]:
    if not profile.links:
        raise TraceError(f"profile {profile.name!r} has no link to a tier below the device, so nothing can move")
    for link in profile.links:
        if not all(0 < rate < math.inf for rate in (link.out_bytes_per_second, link.back_bytes_per_second)):
            raise TraceError(
                f"profile {profile.name!r}: the link from {link.upper} to {link.lower} moves no bytes "
                f"({link.out_bytes_per_second} per second out, {link.back_bytes_per_second} back)"
            )
    return profile.links


def _check_measurements(trace: Trace, measurements: Measurements) -> None:
    count = len(trace.ops)
    for field in ("op_seconds", "workspace_bytes"):
        values = getattr(measurements, field)
        if len(values) != count:
            raise TraceError(f"{field} has {len(values)} measurements and trace {trace.name!r} has {count} ops")
        for index, value in enumerate(values):
            if not (math.isfinite(value) and value >= 0):
                raise TraceError(f"{field}[{index}] ({trace.ops[index].name}) is {value}")
    if not all(math.isfinite(value) for value in (measurements.step_seconds, measurements.stall_seconds)):
        raise TraceError(
            f"the measured step took {measurements.step_seconds} s, {measurements.stall_seconds} of stalls"
        )
