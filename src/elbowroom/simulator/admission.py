"""Checks the inputs of a forecast: the costs belong to the trace, and their figures cannot overflow."""

from __future__ import annotations

import math

from elbowroom.errors import TraceError
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import Link
from elbowroom.ir.trace import Trace

LARGEST_BYTES = 1 << 60
"""All storages together and one workspace must be less: what is counted, twice at the most, has to fit into 64 bits."""


def admit(trace: Trace, costs: Costs) -> None:
    """Check the inputs of a forecast.

    Raises:
        TraceError: the costs belong to another trace; a time is negative or not finite; a size is negative, or all
            sizes together reach `LARGEST_BYTES`; a link has no bandwidth. Names the place.

    Cost: linear in ops and storages.
    """
    count = len(trace.ops)
    if len(costs.op_seconds) != count or len(costs.workspace_bytes) != count:
        raise TraceError(f"costs of {len(costs.op_seconds)} ops do not fit a trace of {count}")
    if not all(0 <= seconds < math.inf for seconds in costs.op_seconds):
        index = next(index for index, seconds in enumerate(costs.op_seconds) if not 0 <= seconds < math.inf)
        raise TraceError(f"ops[{index}] ({trace.ops[index].name}) takes {costs.op_seconds[index]} seconds")
    for name in ("hook_seconds", "overhead_seconds"):
        if not 0 <= getattr(costs, name) < math.inf:
            raise TraceError(f"{name} of the costs is {getattr(costs, name)}")
    _check_bytes(trace, costs)
    for link in (costs.link, *costs.further_links):
        _check_link(link)


def _check_bytes(trace: Trace, costs: Costs) -> None:
    if costs.alignment_bytes <= 0:
        raise TraceError(f"alignment_bytes of the costs is {costs.alignment_bytes}; 1 is no alignment")
    for home in trace.storages:
        if home.nbytes < 0:
            raise TraceError(f"storages[{home.id}] has {home.nbytes} bytes")
    for index, nbytes in enumerate(costs.workspace_bytes):
        if nbytes < 0:
            raise TraceError(f"ops[{index}] ({trace.ops[index].name}) has a workspace of {nbytes} bytes")
    total = sum(home.nbytes for home in trace.storages) + len(trace.storages) * costs.alignment_bytes
    workspace_bytes = max(costs.workspace_bytes, default=0)
    if total + workspace_bytes >= LARGEST_BYTES:
        largest = max(trace.storages, key=lambda home: (home.nbytes, -home.id), default=None)
        what = "" if largest is None else f"; the largest, storages[{largest.id}], has {largest.nbytes}"
        raise TraceError(
            f"all storages and the largest workspace ({workspace_bytes} bytes) have {total + workspace_bytes} bytes "
            f"together, which is more than can be counted ({LARGEST_BYTES}){what}"
        )


def _check_link(link: Link) -> None:
    rates = (link.out_bytes_per_second, link.back_bytes_per_second)
    waits = (link.out_latency_seconds, link.back_latency_seconds, link.drag_seconds_per_byte)
    if not all(0 < rate < math.inf for rate in rates) or not all(0 <= wait < math.inf for wait in waits):
        raise TraceError(
            f"the link from {link.upper} to {link.lower} moves {rates[0]} bytes per second out and {rates[1]} back, "
            f"after {waits[0]} and {waits[1]} seconds, at a drag of {waits[2]} seconds per byte; give it speeds above "
            "0, or measure the machine again with `elbowroom probe`"
        )
