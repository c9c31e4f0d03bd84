"""Time of an op by the roofline model: the longer of the times for its flops and for its bytes.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elbowroom.cost.shapes import (
    count_elements,
    element_bytes,
    is_floating,
    makes_only_a_view,
    short_name,
    touches_no_bytes,
    view_bytes,
)
from elbowroom.errors import TraceError
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.trace import Op, Storage, View

Rates = Mapping[tuple[str, str], float]
"""Flops or bytes per second by (kind, dtype)."""

_PRODUCTS = frozenset(
    [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "linear",
        "linear_backward",
        "matmul",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "ger",
        "addr",
        "einsum",
        "lstm",
        "gru",
        "_addmm_activation",
        "_int_mm",
        "_scaled_mm",
        "_grouped_mm",
        "_scaled_grouped_mm",
        "mkldnn_linear",
        "mkldnn_rnn_layer",
        "mkldnn_rnn_layer_backward",
        "_cudnn_rnn",
        "_cudnn_rnn_backward",
    ]
)
_GATHERS = frozenset({"embedding", "index", "index_select", "gather"})


def index_rates(profile: HardwareProfile) -> dict[tuple[str, str], float]:
    """Return the rates of a profile by (kind, dtype).

    Raises:
        TraceError: there is no rate for elementwise or none for matrix-like ops, or a rate is not positive.
    """
    rates = {(rate.kind, rate.dtype): rate.per_second for rate in profile.rates}
    for (kind, dtype), per_second in rates.items():
        if not (math.isfinite(per_second) and per_second > 0):
            raise TraceError(f"profile {profile.name!r}: {kind} in {dtype} runs at {per_second} per second")
    kinds = {kind for kind, _ in rates}
    if "elementwise" not in kinds or not kinds & {"matmul", "convolution", "attention"}:
        raise TraceError(f"profile {profile.name!r} has rates for {sorted(kinds)}; it needs 'elementwise' and 'matmul'")
    return rates


def find_kind(op: Op) -> str:
    """Return the kind of rate of an op: "convolution", "attention", "matmul" or "elementwise"."""
    name = short_name(op)
    if "convolution" in name or name.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")):
        return "convolution"
    if "scaled_dot_product" in name or "_attention" in name:
        return "attention"
    # An unknown op with flops is most like a matrix product.
    return "matmul" if name in _PRODUCTS or op.flops > 0 else "elementwise"


def estimate_seconds(op: Op, storages: Sequence[Storage], rates: Rates, profile: HardwareProfile) -> float:
    """Estimate the seconds of one op.

    Args:
        storages: storages of the trace, by id: an expanded tensor has no more bytes than its storage.
        rates: from `index_rates` of the same profile.
    """
    if touches_no_bytes(op) or makes_only_a_view(op):
        return profile.op_latency_seconds
    kind, dtype = find_kind(op), _working_dtype(op)
    work = count_moved_bytes(op, storages) / find_rate(rates, "elementwise", dtype)
    if kind != "elementwise":
        work = max(work, (op.flops or guess_flops(op, kind)) / find_rate(rates, kind, dtype))
    # On a CPU the host runs each op; on an accelerator launches overlap with earlier ops.
    latency = profile.op_latency_seconds
    return latency + work if profile.device == "cpu" else max(latency, work)


def count_moved_bytes(op: Op, storages: Sequence[Storage]) -> int:
    """Return the bytes that an op reads and writes."""
    written = sum(_held_bytes(view, storages) for view in op.writes)
    # A tensor passed twice is read once.
    reads = {(view.storage, view.version, view.shape): view for view in op.reads}
    if short_name(op) in _GATHERS:
        # These read the positions, and only as much of the table as they write.
        positions = sum(_held_bytes(view, storages) for view in reads.values() if not is_floating(view.dtype))
        return 2 * written + positions
    return written + sum(_held_bytes(view, storages) for view in reads.values())


def _held_bytes(view: View, storages: Sequence[Storage]) -> int:
    return min(view_bytes(view), storages[view.storage].nbytes)


def _working_dtype(op: Op) -> str:
    """Return the floating dtype of the largest tensor, in which the op computes."""
    views = [view for view in op.reads + op.writes if is_floating(view.dtype)]
    return max(views, key=view_bytes).dtype if views else "float32"


def find_rate(rates: Rates, kind: str, dtype: str) -> float:
    """Return the rate of a kind in a dtype, or the nearest measured one.

    A matrix-like kind without a rate runs at that of matmul. A dtype without a rate runs at that of float32, which
    hardware falls back to, or proportionally slower if its elements are larger.
    """
    kinds = [kind] if kind == "elementwise" else [kind, "matmul", "convolution", "attention"]
    for candidate in kinds:
        if (candidate, dtype) in rates:
            return rates[candidate, dtype]
        known = [per_second for (other, _), per_second in rates.items() if other == candidate]
        if known:
            # Elementwise rates are in bytes, so they already account for larger elements.
            share = 1.0 if kind == "elementwise" else min(1.0, 4 / element_bytes(dtype))
            return rates.get((candidate, "float32"), min(known)) * share
    raise TraceError(f"there is no rate for {kind} in {dtype}")


def guess_flops(op: Op, kind: str) -> float:
    """Guess the flops of a matrix-like op, captured without a count, from its shapes.

    Attention: two products of the queries with every key, 2.5 times that backward. Others: a product of m x k with
    k x n has operands of mk, kn and mn elements, and the square root of their product is mkn.
    """
    if kind == "attention" and len(op.reads) >= 3:
        backward = "backward" in short_name(op)
        query, key = op.reads[1:3] if backward and len(op.reads) >= 4 else op.reads[:2]
        keys = key.shape[-2] if len(key.shape) >= 2 else 1
        return 4.0 * count_elements(query) * keys * (2.5 if backward else 1.0)
    largest = sorted((count_elements(view) for view in op.reads), reverse=True)[:2]
    results = [count_elements(view) for view in op.writes]
    return 2.0 * math.sqrt(math.prod(largest) * max(results)) if len(largest) == 2 and results else 0.0
