"""The time of one op on one machine: the longer of its flops and its bytes.

Source: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elbowroom.cost.shapes import count_elements, element_bytes, is_floating, short_name, touches_no_bytes, view_bytes
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
    """The rates of a profile by (kind, dtype).

    Raises:
        TraceError: there are none for elementwise or none for matrix-like ops, or one of them is 0.
    """
    rates = {(rate.kind, rate.dtype): rate.per_second for rate in profile.rates}
    for (kind, dtype), per_second in rates.items():
        if not (math.isfinite(per_second) and per_second > 0):
            raise TraceError(f"profile {profile.name!r}: {kind} in {dtype} runs at {per_second} per second")
    kinds = {kind for kind, _ in rates}
    if "elementwise" not in kinds or not kinds & {"matmul", "convolution", "attention"}:
        raise TraceError(f"profile {profile.name!r} has rates for {sorted(kinds)}; it takes 'elementwise' and 'matmul'")
    return rates


def find_kind(op: Op) -> str:
    """Which rate an op runs at: "convolution", "attention", "matmul" or "elementwise"."""
    name = short_name(op)
    if "convolution" in name or name.startswith(("conv1d", "conv2d", "conv3d", "conv_transpose")):
        return "convolution"
    if "scaled_dot_product" in name or "_attention" in name:
        return "attention"
    # An op that does flops and is not known by name is most like a matrix product.
    return "matmul" if name in _PRODUCTS or op.flops > 0 else "elementwise"


def estimate_seconds(op: Op, storages: Sequence[Storage], rates: Rates, profile: HardwareProfile) -> float:
    """Seconds of one op by itself.

    Args:
        storages: of the trace, by id: an expanded tensor has no more bytes than its storage.
        rates: from `index_rates` of the same profile.
    """
    if touches_no_bytes(op):
        return profile.op_latency_seconds
    kind, dtype = find_kind(op), _working_dtype(op)
    work = count_moved_bytes(op, storages) / find_rate(rates, "elementwise", dtype)
    if kind != "elementwise":
        work = max(work, (op.flops or guess_flops(op, kind)) / find_rate(rates, kind, dtype))
    # On a CPU the program waits for each op; on an accelerator it launches the next one meanwhile.
    latency = profile.op_latency_seconds
    return latency + work if profile.device == "cpu" else max(latency, work)


def count_moved_bytes(op: Op, storages: Sequence[Storage]) -> int:
    """Bytes that an op reads and writes."""
    written = sum(_held_bytes(view, storages) for view in op.writes)
    # A tensor given twice is read once.
    reads = {(view.storage, view.version, view.shape): view for view in op.reads}
    if short_name(op) in _GATHERS:
        # They read of the table only what they write, and the positions.
        positions = sum(_held_bytes(view, storages) for view in reads.values() if not is_floating(view.dtype))
        return 2 * written + positions
    return written + sum(_held_bytes(view, storages) for view in reads.values())


def _held_bytes(view: View, storages: Sequence[Storage]) -> int:
    return min(view_bytes(view), storages[view.storage].nbytes)


def _working_dtype(op: Op) -> str:
    """The floating dtype of the largest tensor, which is what an op works in."""
    views = [view for view in op.reads + op.writes if is_floating(view.dtype)]
    return max(views, key=view_bytes).dtype if views else "float32"


def find_rate(rates: Rates, kind: str, dtype: str) -> float:
    """The rate of a kind in a dtype, or of what comes nearest to it where that was not measured.

    A matrix-like kind without figures runs at the rate of products. A dtype without figures runs at the rate of
    float32, in proportion where its elements are larger, because that is what hardware without it falls back to.
    """
    kinds = [kind] if kind == "elementwise" else [kind, "matmul", "convolution", "attention"]
    for candidate in kinds:
        if (candidate, dtype) in rates:
            return rates[candidate, dtype]
        known = [per_second for (other, _), per_second in rates.items() if other == candidate]
        if known:
            # Elementwise rates count bytes, so larger elements take their share anyhow.
            share = 1.0 if kind == "elementwise" else min(1.0, 4 / element_bytes(dtype))
            return rates.get((candidate, "float32"), min(known)) * share
    raise TraceError(f"there is no rate for {kind} in {dtype}")


def guess_flops(op: Op, kind: str) -> float:
    """Flops of a matrix-like op that was captured without any, from its shapes.

    Attention: two products of the queries with every key, 2.5 times that backward. Others: a product of m x k with
    k x n has sides of mk, kn and mn elements, and the root of their product is mkn.
    """
    if kind == "attention" and len(op.reads) >= 3:
        backward = "backward" in short_name(op)
        query, key = op.reads[1:3] if backward and len(op.reads) >= 4 else op.reads[:2]
        keys = key.shape[-2] if len(key.shape) >= 2 else 1
        return 4.0 * count_elements(query) * keys * (2.5 if backward else 1.0)
    largest = sorted((count_elements(view) for view in op.reads), reverse=True)[:2]
    results = [count_elements(view) for view in op.writes]
    return 2.0 * math.sqrt(math.prod(largest) * max(results)) if len(largest) == 2 and results else 0.0
